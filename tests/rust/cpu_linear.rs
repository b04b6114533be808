//! Products with packed weights: every arithmetic against plain f64, and bits that must not move.

use half::{bf16, f16};
use pagedkv::cpu::element::Dtype;
use pagedkv::cpu::linear::{Arithmetic, Linear, PackedWeight, Part};
use pagedkv::cpu::pool;
use pagedkv::cpu::tensor::MatrixView;
use proptest::prelude::*;

const TYPES: [Dtype; 3] = [Dtype::F32, Dtype::Bf16, Dtype::F16];

/// Rows of a type, with a gap of NaN behind each.
struct Rows {
    dtype: Dtype,
    len: usize,
    width: usize,
    row_stride: usize,
    words: Vec<u64>,
}

impl Rows {
    fn filled(dtype: Dtype, num_rows: usize, width: usize, gap: usize) -> Self {
        let len = num_rows * (width + gap);
        let mut rows = Self {
            dtype,
            len: num_rows,
            width,
            row_stride: width + gap,
            words: vec![0; (len * dtype.size()).div_ceil(8)],
        };
        (0..len).for_each(|idx| rows.set(idx, f32::NAN));
        rows
    }

    /// Numbers between -1 and 1 that the type holds.
    fn random(dtype: Dtype, num_rows: usize, width: usize, gap: usize, seed: u64) -> Self {
        let mut rows = Self::filled(dtype, num_rows, width, gap);
        let mut state = seed;
        for row in 0..num_rows {
            for column in 0..width {
                state = state
                    .wrapping_mul(6_364_136_223_846_793_005)
                    .wrapping_add(1_442_695_040_888_963_407);
                rows.set(
                    row * rows.row_stride + column,
                    (state >> 40) as f32 / 8_388_608.0 - 1.0,
                );
            }
        }
        rows
    }

    fn set(&mut self, idx: usize, value: f32) {
        let words = self.words.as_mut_ptr();
        // SAFETY: idx is below the length.
        unsafe {
            match self.dtype {
                Dtype::F32 => *words.cast::<f32>().add(idx) = value,
                Dtype::Bf16 => *words.cast::<bf16>().add(idx) = bf16::from_f32(value),
                Dtype::F16 => *words.cast::<f16>().add(idx) = f16::from_f32(value),
            }
        }
    }

    fn get(&self, row: usize, column: usize) -> f32 {
        let idx = row * self.row_stride + column;
        let words = self.words.as_ptr();
        // SAFETY: idx is below the length.
        unsafe {
            match self.dtype {
                Dtype::F32 => *words.cast::<f32>().add(idx),
                Dtype::Bf16 => (*words.cast::<bf16>().add(idx)).to_f32(),
                Dtype::F16 => (*words.cast::<f16>().add(idx)).to_f32(),
            }
        }
    }

    fn bits(&self, row: usize) -> Vec<u32> {
        (0..self.width)
            .map(|column| self.get(row, column).to_bits())
            .collect()
    }

    fn view(&self, first_row: usize, num_rows: usize) -> MatrixView {
        let offset = first_row * self.row_stride * self.dtype.size();
        MatrixView {
            address: self.words.as_ptr().cast::<u8>().wrapping_add(offset).cast_mut(),
            dtype: self.dtype,
            num_rows,
            width: self.width,
            row_stride: self.row_stride,
        }
    }
}

struct Weights {
    parts: Vec<Rows>,
    biases: Vec<Rows>,
    is_gated: bool,
}

impl Weights {
    fn random(dtype: Dtype, sizes: &[usize], in_size: usize, has_bias: bool, is_gated: bool) -> Self {
        let rows = |n: usize, seed| Rows::random(dtype, n, in_size, 3, seed);
        Self {
            parts: sizes.iter().zip(1..).map(|(&n, seed)| rows(n, seed)).collect(),
            biases: sizes
                .iter()
                .zip(100..)
                .filter(|_| has_bias)
                .map(|(&n, seed)| Rows::random(dtype, 1, n, 0, seed))
                .collect(),
            is_gated,
        }
    }

    /// The numbers nearest to them that the panels of the arithmetic hold.
    fn rounded(self, arithmetic: Arithmetic) -> Self {
        let dtype = self.parts[0].dtype;
        if arithmetic.panel_dtype(dtype) == dtype {
            return self;
        }
        let round = |rows: Rows| {
            let mut rounded = Rows {
                words: rows.words.clone(),
                ..rows
            };
            for idx in 0..rows.len * rows.row_stride {
                rounded.set(idx, bf16::from_f32(rows.get(0, idx)).to_f32());
            }
            rounded
        };
        Self {
            parts: self.parts.into_iter().map(round).collect(),
            ..self
        }
    }

    fn pack(&self, arithmetic: Arithmetic) -> PackedWeight {
        let parts: Vec<Part> = self
            .parts
            .iter()
            .enumerate()
            .map(|(idx, part)| Part {
                weight: part.words.as_ptr().cast(),
                num_rows: part.len,
                row_stride: part.row_stride,
                bias: self
                    .biases
                    .get(idx)
                    .map_or(std::ptr::null(), |bias| bias.words.as_ptr().cast()),
            })
            .collect();
        // SAFETY: the parts are whole.
        unsafe {
            PackedWeight::pack(
                arithmetic,
                self.parts[0].dtype,
                self.parts[0].width,
                &parts,
                self.is_gated,
            )
        }
        .unwrap()
    }

    /// The twin: every sum in f64.
    fn multiply(&self, x: &Rows, row: usize) -> Vec<f64> {
        let product = |part: usize, column: usize| {
            let weight = &self.parts[part];
            let sum: f64 = (0..x.width)
                .map(|k| f64::from(x.get(row, k)) * f64::from(weight.get(column, k)))
                .sum();
            sum + self
                .biases
                .get(part)
                .map_or(0.0, |bias| f64::from(bias.get(0, column)))
        };
        if self.is_gated {
            return (0..self.parts[0].len)
                .map(|column| {
                    let (gate, up) = (product(0, column), product(1, column));
                    gate / (1.0 + (-gate).exp()) * up
                })
                .collect();
        }
        (0..self.parts.len())
            .flat_map(|part| (0..self.parts[part].len).map(move |column| (part, column)))
            .map(|(part, column)| product(part, column))
            .collect()
    }
}

fn run(weight: &PackedWeight, x: MatrixView, out_type: Dtype) -> Rows {
    let out = Rows::filled(out_type, x.num_rows, weight.out_size(), 5);
    run_into(out, weight, x, false)
}

fn run_into(out: Rows, weight: &PackedWeight, x: MatrixView, adds: bool) -> Rows {
    let call = Linear {
        out: out.view(0, x.num_rows),
        adds,
        x,
        weight,
    };
    call.check().unwrap();
    // SAFETY: checked; both are whole.
    unsafe { call.run() };
    for row in 0..x.num_rows {
        for gap in out.width..out.row_stride {
            assert!(out.get(row, gap).is_nan(), "row {row} was written beyond its end");
        }
    }
    out
}

fn assert_near(weights: &Weights, x: &Rows, out: &Rows, context: &str) {
    // An error of a rounding of each product and sum, and of the result.
    let resolution = match out.dtype {
        Dtype::F32 => 1e-6,
        Dtype::Bf16 => 4.1e-3,
        Dtype::F16 => 5e-4,
    };
    for row in 0..x.len {
        for (column, exact) in weights.multiply(x, row).into_iter().enumerate() {
            let got = f64::from(out.get(row, column));
            let allowed = resolution * exact.abs() + 4e-7 * x.width as f64 * (1.0 + exact.abs().sqrt());
            assert!(
                (got - exact).abs() <= allowed,
                "{context}, [{row}, {column}]: {got}, not {exact}"
            );
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn every_arithmetic_is_near_the_exact_product(
        num_rows in 1_usize..40,
        in_size in 1_usize..200,
        sizes in prop::collection::vec(1_usize..70, 1..4),
        has_bias: bool,
        is_gated: bool,
        out_f32: bool,
    ) {
        let sizes = if is_gated { vec![sizes[0]; 2] } else { sizes };
        for dtype in TYPES {
            let x = Rows::random(dtype, num_rows, in_size, 7, 77);
            for arithmetic in Arithmetic::available(dtype) {
                let weights =
                    Weights::random(dtype, &sizes, in_size, has_bias, is_gated).rounded(arithmetic);
                let packed = weights.pack(arithmetic);
                let out = run(&packed, x.view(0, num_rows), if out_f32 { Dtype::F32 } else { dtype });
                assert_near(&weights, &x, &out, &format!("{dtype:?} {}", arithmetic.name()));
            }
        }
    }

    /// The twin: the product, rounded, is added in f32, and the sum rounded.
    #[test]
    fn what_is_added_is_the_rounded_product(
        num_rows in 1_usize..70,
        in_size in 1_usize..200,
        sizes in prop::collection::vec(1_usize..70, 1..4),
        has_bias: bool,
        is_gated: bool,
    ) {
        let sizes = if is_gated { vec![sizes[0]; 2] } else { sizes };
        for dtype in TYPES {
            let x = Rows::random(dtype, num_rows, in_size, 7, 77);
            for arithmetic in Arithmetic::available(dtype) {
                let weights =
                    Weights::random(dtype, &sizes, in_size, has_bias, is_gated).rounded(arithmetic);
                let packed = weights.pack(arithmetic);
                for out_type in [dtype, Dtype::F32] {
                    let product = run(&packed, x.view(0, num_rows), out_type);
                    let residual = || Rows::random(out_type, num_rows, product.width, 5, 13);
                    let mut expected = residual();
                    for row in 0..num_rows {
                        for column in 0..product.width {
                            let sum = expected.get(row, column) + product.get(row, column);
                            expected.set(row * expected.row_stride + column, sum);
                        }
                    }
                    let got = run_into(residual(), &packed, x.view(0, num_rows), true);
                    for row in 0..num_rows {
                        prop_assert_eq!(
                            got.bits(row), expected.bits(row),
                            "{:?} {}, row {}", out_type, arithmetic.name(), row
                        );
                    }
                }
            }
        }
    }

    #[test]
    fn rows_of_the_weight_come_back(in_size in 1_usize..90, num_rows in 1_usize..70) {
        for dtype in TYPES {
            for arithmetic in Arithmetic::available(dtype) {
                let weights = Weights::random(dtype, &[num_rows], in_size, false, false).rounded(arithmetic);
                let packed = weights.pack(arithmetic);
                let out = Rows::filled(dtype, num_rows, in_size, 0);
                let ids: Vec<i32> = (0..num_rows).rev().map(|row| i32::try_from(row).unwrap()).collect();
                packed.check_rows(&ids).unwrap();
                // SAFETY: checked, and `out` has a row for each.
                unsafe { packed.copy_rows(&ids, out.view(0, num_rows).address) };
                for row in 0..num_rows {
                    prop_assert_eq!(out.bits(num_rows - 1 - row), weights.parts[0].bits(row));
                }
            }
        }
    }
}

/// The same row alone, in batches of every kind of tile, at every place in them, and on one to three threads.
#[test]
fn bits_depend_on_the_row_alone() {
    let (in_size, sizes) = (600, [100, 45]);
    for dtype in TYPES {
        let x = Rows::random(dtype, 600, in_size, 2, 5);
        for arithmetic in Arithmetic::available(dtype) {
            let weights = Weights::random(dtype, &sizes, in_size, true, false).rounded(arithmetic);
            let packed = weights.pack(arithmetic);
            let alone: Vec<Vec<u32>> = (0..600)
                .map(|row| run(&packed, x.view(row, 1), Dtype::F32).bits(0))
                .collect();
            for num_threads in [1, 2, 3] {
                pool::set_num_threads(num_threads).unwrap();
                for num_rows in (2..35).chain([48, 63, 64, 65, 127, 255, 256, 257, 300, 513, 600]) {
                    let first = 600 - num_rows;
                    let out = run(&packed, x.view(first, num_rows), Dtype::F32);
                    for row in 0..num_rows {
                        let context = format!("{dtype:?} {}, {num_rows} rows, row {row}", arithmetic.name());
                        assert_eq!(out.bits(row), alone[first + row], "{context}");
                    }
                }
            }
            pool::set_num_threads(2).unwrap();
        }
    }
}

/// Where the order of the sum is the plain one, the twin agrees bit by bit.
#[test]
fn f32_sums_are_multiply_adds_in_order() {
    let weights = Weights::random(Dtype::F32, &[37], 450, true, false);
    let x = Rows::random(Dtype::F32, 30, 450, 0, 9);
    for arithmetic in Arithmetic::available(Dtype::F32) {
        if arithmetic.name() == "portable" || arithmetic.panel_dtype(Dtype::F32) != Dtype::F32 {
            continue; // They round products where the target has no fused operation, or add in another order.
        }
        let out = run(&weights.pack(arithmetic), x.view(0, 30), Dtype::F32);
        for row in 0..30 {
            for column in 0..37 {
                let sum = (0..450).fold(0.0_f32, |sum, k| {
                    x.get(row, k).mul_add(weights.parts[0].get(column, k), sum)
                });
                let expected = sum + weights.biases[0].get(0, column);
                assert_eq!(
                    out.get(row, column).to_bits(),
                    expected.to_bits(),
                    "{}",
                    arithmetic.name()
                );
            }
        }
    }
}

/// Numbers of bf16 in f32 weights lose no digit of x: sums are as near to the exact ones as those of multiply-adds.
#[test]
fn parts_are_as_exact_as_f32() {
    let error_of = |arithmetic: Arithmetic, weights: &Weights, x: &Rows| {
        let out = run(&weights.pack(arithmetic), x.view(0, x.len), Dtype::F32);
        let square =
            |(row, column, exact): (usize, usize, f64)| (f64::from(out.get(row, column)) - exact).powi(2);
        let exact = (0..x.len).flat_map(|row| {
            let sums = weights.multiply(x, row).into_iter().enumerate();
            sums.map(move |(column, exact)| (row, column, exact))
                .collect::<Vec<_>>()
        });
        exact.map(square).sum::<f64>().sqrt()
    };
    for arithmetic in Arithmetic::available(Dtype::F32) {
        if arithmetic.panel_dtype(Dtype::F32) == Dtype::F32 {
            continue;
        }
        let weights = Weights::random(Dtype::F32, &[48], 1536, false, false).rounded(arithmetic);
        let x = Rows::random(Dtype::F32, 20, 1536, 0, 3);
        let plain = Arithmetic::available(Dtype::F32)[0];
        let (error, plain_error) = (error_of(arithmetic, &weights, &x), error_of(plain, &weights, &x));
        assert!(
            error < plain_error,
            "{}: {error}, multiply-adds {plain_error}",
            arithmetic.name()
        );
    }
}

/// Where few high bytes make up a weight it lies in codes, exceptions included, and beside a part of every size it does not:
/// products and rows are the same, bit by bit.
#[test]
fn codes_change_no_bit() {
    for dtype in [Dtype::Bf16, Dtype::F32] {
        for arithmetic in Arithmetic::available(dtype) {
            for (in_size, num_columns) in [(5, 40), (33, 20), (96, 170), (600, 145)] {
                let mut weights = Weights::random(dtype, &[num_columns], in_size, false, false);
                for column in (0..num_columns).step_by(9) {
                    let exception = [1e-30, -3e30, -0.0, 2e-38][column / 9 % 4];
                    weights.parts[0].set(column * (in_size + 3) + column % in_size, exception);
                }
                let mut plain = Weights::random(dtype, &[num_columns, 40], in_size, false, false);
                plain.parts[0].words.clone_from(&weights.parts[0].words);
                for (idx, power) in (0..40 * (in_size + 3)).zip((-125..125).cycle()) {
                    plain.parts[1].set(idx, 2_f32.powi(power));
                }
                let (weights, plain) = (weights.rounded(arithmetic), plain.rounded(arithmetic));
                let (coded, plain) = (weights.pack(arithmetic), plain.pack(arithmetic));
                assert_eq!(
                    coded.is_coded(),
                    arithmetic.takes_codes(),
                    "{}",
                    arithmetic.name()
                );
                assert!(!plain.is_coded());
                if coded.is_coded() {
                    assert!(coded.num_bytes() < coded.num_elements() * 27 / 16, "{in_size}");
                }
                let x = Rows::random(dtype, 200, in_size, 0, 4);
                for num_rows in [1, 3, 16, 17, 31, 32, 33, 64, 65, 80, 130, 200] {
                    let out = run(&coded, x.view(0, num_rows), Dtype::F32);
                    let expected = run(&plain, x.view(0, num_rows), Dtype::F32);
                    for row in 0..num_rows {
                        assert_eq!(
                            out.bits(row),
                            expected.bits(row)[..num_columns],
                            "{} {in_size} {num_columns}, row {row} of {num_rows}",
                            arithmetic.name()
                        );
                    }
                }
                let ids: Vec<i32> = (0..).take(num_columns).collect();
                let rows = Rows::filled(dtype, num_columns, in_size, 0);
                // SAFETY: these are all rows, and there is room for them.
                unsafe { coded.copy_rows(&ids, rows.view(0, num_columns).address) };
                for row in 0..num_columns {
                    assert_eq!(rows.bits(row), weights.parts[0].bits(row), "row {row}");
                }
            }
        }
    }
}

#[test]
fn weights_in_f32_lie_as_bf16_only_where_they_are() {
    let weights = Weights::random(Dtype::F32, &[20, 4], 33, false, false);
    let parts = |weights: &Weights| -> Vec<Part> {
        let part = |part: &Rows| Part {
            weight: part.words.as_ptr().cast(),
            num_rows: part.len,
            row_stride: part.row_stride,
            bias: std::ptr::null(),
        };
        weights.parts.iter().map(part).collect()
    };
    // SAFETY: the parts are whole.
    let pack = |weights: &Weights| unsafe {
        PackedWeight::pack_for_process(Dtype::F32, 33, &parts(weights), false).unwrap()
    };
    assert_eq!(pack(&weights).panel_dtype(), Dtype::F32);
    let best = Arithmetic::best(Dtype::F32, || true);
    let packed = pack(&weights.rounded(best));
    assert_eq!(packed.panel_dtype(), best.panel_dtype(Dtype::F32));
    assert_eq!(
        (packed.dtype(), packed.arithmetic().name()),
        (Dtype::F32, best.name())
    );
}

#[test]
fn what_does_not_fit_is_refused() {
    let weights = Weights::random(Dtype::F32, &[20], 30, false, false);
    let packed = weights.pack(Arithmetic::best(Dtype::F32, || false));
    let (x, out) = (
        Rows::filled(Dtype::F32, 2, 31, 0),
        Rows::filled(Dtype::F32, 2, 20, 0),
    );
    let refusal = |x: MatrixView, out: MatrixView| {
        Linear {
            out,
            adds: false,
            x,
            weight: &packed,
        }
        .check()
        .unwrap_err()
        .to_string()
    };
    assert_eq!(
        refusal(x.view(0, 2), out.view(0, 2)),
        "width of x is 31, allowed: 30"
    );
    let half = Rows::filled(Dtype::Bf16, 2, 30, 0);
    assert_eq!(
        refusal(half.view(0, 2), out.view(0, 2)),
        "dtype of x is bfloat16, allowed: that of the weight, float32"
    );
    let x = Rows::filled(Dtype::F32, 3, 30, 0);
    assert_eq!(
        refusal(x.view(0, 3), out.view(0, 2)),
        "shape of out is [2, 20], allowed: [3, 20]"
    );
    assert_eq!(
        packed.check_rows(&[3, 20]).unwrap_err().to_string(),
        "row_ids[1] is 20, allowed: 0 to 19"
    );
    let part = |num_rows| Part {
        weight: std::ptr::null(),
        num_rows,
        row_stride: 0,
        bias: std::ptr::null(),
    };
    let pack = |parts: &[Part], is_gated| {
        // SAFETY: refused before anything is read.
        unsafe {
            PackedWeight::pack(
                Arithmetic::best(Dtype::F32, || false),
                Dtype::F32,
                8,
                parts,
                is_gated,
            )
        }
        .unwrap_err()
        .to_string()
    };
    assert_eq!(
        pack(&[part(0)], false),
        "shape of the weight is [0, 8], allowed: no zero in it"
    );
    assert_eq!(
        pack(&[part(4), part(5)], true),
        "rows of gated weights is [4, 5], allowed: two of a size"
    );
}
