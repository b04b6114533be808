//! bf16 in twelve bits, without loss.
//!
//! A product of few rows takes as long as its weights take to come from memory, and a bf16 has more bits than its
//! number needs: the high byte, sign and seven bits of the exponent, takes few values among the elements of one weight.
//! So the low bytes of a panel lie as they are, and for the high ones codes of four bits, which stand for the fifteen
//! that are most frequent in the weight and for that of zero. The few elements with another high byte are exceptions,
//! listed by panel. Every element comes back bit by bit. That the exponents of weights carry little information is known
//! (Zhang et al., 70% Size, 100% Accuracy: Lossless LLM Compression via Dynamic-Length Float, 2025); codes of one length
//! are larger than theirs, and a vector of 32 elements is put together again in two instructions.
//!
//! A step is what a tile of AMX multiplies at once: 16 lines of 32 elements. It has twelve lines: eight of low bytes, two
//! lines of elements in each, then four of codes, four lines of elements in each. Those of two lines alternate byte by byte,
//! such that those of the second line are already where they belong in its words of 16 bits.

use super::packed::Part;
use crate::cpu::element::Dtype;

/// Elements of a line.
const LINE: usize = 32;
/// Lines whose codes share a line.
pub(super) const GROUP_LINES: usize = 4;
/// Such groups in a step.
pub(super) const GROUPS: usize = 4;
/// Elements of a step.
pub(super) const STEP_ELEMENTS: usize = GROUPS * GROUP_LINES * LINE;
/// Bytes of a coded step.
pub(super) const STEP_BYTES: usize = STEP_ELEMENTS * 12 / 8;
/// Bytes of a step whose elements are not coded, or no longer.
pub(super) const PLAIN_STEP_BYTES: usize = STEP_ELEMENTS * size_of::<u16>();
/// Bytes of a coded step before the codes.
pub(super) const LOW_BYTES: usize = STEP_ELEMENTS;

/// High bytes that there are codes for.
const NUM_CODES: usize = 16;
/// What stands for no code, whose lower bits are those of the first one.
const NO_CODE: u8 = 0x80;
/// Rows of a part that are looked at for the choice of a code.
const SAMPLED_ROWS: usize = 128;
/// Elements for each exception of a weight that is coded, at least.
const ELEMENTS_PER_EXCEPTION: usize = 128;

/// An element whose high byte has no code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Exception {
    /// The step of the panel.
    pub(super) step: u32,
    /// Its place among the elements of the step.
    pub(super) place: u16,
    pub(super) bits: u16,
}

impl Exception {
    /// Its place among the elements of the panel.
    pub(super) fn element(self) -> usize {
        self.step as usize * STEP_ELEMENTS + usize::from(self.place)
    }

    /// What stands behind the last exception of a panel.
    const END: Self = Self {
        step: u32::MAX,
        place: 0,
        bits: 0,
    };
}

/// Which high bytes the codes stand for.
#[derive(Clone, Debug)]
pub(super) struct Code {
    /// By code, four times: whoever looks a code up need not clear the two bits above it.
    pub(super) high_bytes: [u8; 4 * NUM_CODES],
}

/// What a weight whose panels are coded has beside them.
#[derive(Debug)]
pub(super) struct Coding {
    pub(super) code: Code,
    /// By panel, and within one by step; the end of each is marked.
    exceptions: Vec<Exception>,
    /// Where those of a panel begin.
    starts: Vec<usize>,
}

impl Coding {
    /// Joins what was found panel by panel, in their order.
    pub(super) fn new(code: Code, exceptions_by_panel: impl Iterator<Item = Vec<Exception>>) -> Self {
        let (mut exceptions, mut starts) = (Vec::new(), vec![0]);
        for of_panel in exceptions_by_panel {
            exceptions.extend(of_panel);
            exceptions.push(Exception::END);
            starts.push(exceptions.len());
        }
        Self {
            code,
            exceptions,
            starts,
        }
    }

    /// Bytes of the lists.
    pub(super) fn num_bytes(&self) -> usize {
        size_of_val(&*self.exceptions) + size_of_val(&*self.starts)
    }

    /// The exceptions of a panel.
    pub(super) fn exceptions(&self, panel: usize) -> &[Exception] {
        &self.exceptions[self.starts[panel]..self.starts[panel + 1] - 1]
    }

    /// The same for whoever reads on until a step has come that is not there: behind them stands one more.
    pub(super) fn first_exception(&self, panel: usize) -> *const Exception {
        self.exceptions[self.starts[panel]..].as_ptr()
    }
}

impl Code {
    /// The best one for parts of a weight, f32 that are numbers of bf16, or bf16; none if too many elements would be
    /// exceptions.
    ///
    /// # Safety
    /// The parts are readable.
    pub(super) unsafe fn choose(dtype: Dtype, in_size: usize, parts: &[Part]) -> Option<Self> {
        let element_bytes = dtype.size();
        let mut counts = [0_usize; 256];
        for part in parts {
            // An odd distance, so that all dimensions of heads have their turn.
            let distance = part.num_rows.div_ceil(SAMPLED_ROWS) | 1;
            for row in (0..part.num_rows).step_by(distance) {
                let row = part.weight.wrapping_add(row * part.row_stride * element_bytes);
                for k in 0..in_size {
                    // SAFETY: the caller vouches for the rows. The high byte is the last one of an element.
                    let high = unsafe { *row.wrapping_add((k + 1) * element_bytes - 1) };
                    counts[usize::from(high)] += 1;
                }
            }
        }
        let num_elements: usize = counts.iter().sum();
        counts[0] = usize::MAX; // Panels are filled up with zeros.
        let mut by_count: Vec<u8> = (0..=u8::MAX).collect();
        by_count.sort_by_key(|&high| std::cmp::Reverse(counts[usize::from(high)]));
        let (kept, others) = by_count.split_at(NUM_CODES);
        let num_exceptions: usize = others.iter().map(|&high| counts[usize::from(high)]).sum();
        (!are_too_many(num_exceptions, num_elements)).then(|| Self {
            high_bytes: std::array::from_fn(|code| kept[code % NUM_CODES]),
        })
    }

    /// The code of each high byte, or `NO_CODE`.
    pub(super) fn codes(&self) -> [u8; 256] {
        let mut codes = [NO_CODE; 256];
        for (code, &high) in (0..).zip(self.high_bytes.iter().take(NUM_CODES)) {
            codes[usize::from(high)] = code;
        }
        codes
    }

    /// An element of a panel, unless it is an exception: the twin of the kernel that puts whole lines together.
    ///
    /// # Safety
    /// The panel is readable, and long enough.
    pub(super) unsafe fn element(&self, panel: *const u8, element: usize) -> u16 {
        let step = panel.wrapping_add(element / STEP_ELEMENTS * STEP_BYTES);
        let element = element % STEP_ELEMENTS;
        let (byte, shift) = code_place(element);
        // SAFETY: both are within the step.
        let (low, codes) = unsafe { (*step.add(low_byte(element)), *step.add(byte)) };
        u16::from_le_bytes([low, self.high_bytes[usize::from(codes >> shift) % NUM_CODES]])
    }
}

/// The byte of a step that has the code of an element, and the bits below it there. The codes of the first two lines of a
/// group are the lower ones.
fn code_place(element: usize) -> (usize, usize) {
    let (line, word) = (element / LINE, element % LINE);
    let byte = LOW_BYTES + 2 * (line / GROUP_LINES * LINE + word) + line % 2;
    (byte, line % GROUP_LINES / 2 * 4)
}

/// Codes a step of a panel, by the codes of all high bytes, and adds its exceptions to those found before.
pub(super) fn encode(
    codes: &[u8; 256],
    step: usize,
    elements: &[u16; STEP_ELEMENTS],
    exceptions: &mut Vec<Exception>,
) -> [u8; STEP_BYTES] {
    let mut out = [0; STEP_BYTES];
    let (low, high) = out.split_at_mut(LOW_BYTES);
    for group in 0..GROUPS {
        let (lines, _) = elements[group * GROUP_LINES * LINE..].as_chunks::<LINE>();
        let low = &mut low[group * 4 * LINE..][..4 * LINE];
        let high = &mut high[group * 2 * LINE..][..2 * LINE];
        for word in 0..LINE {
            let bytes = [0, 1, 2, 3].map(|line| lines[line][word].to_le_bytes());
            let found = bytes.map(|[_, high]| codes[usize::from(high)]);
            // Those of the second line of a pair are already at their place in a word.
            (low[2 * word], low[2 * word + 1]) = (bytes[1][0], bytes[0][0]);
            (low[2 * (LINE + word)], low[2 * (LINE + word) + 1]) = (bytes[3][0], bytes[2][0]);
            high[2 * word] = (found[0] % NO_CODE) | (found[2] << 4);
            high[2 * word + 1] = (found[1] % NO_CODE) | (found[3] << 4);
            if found.iter().fold(0, |all, code| all | code) < NO_CODE {
                continue;
            }
            for line in (0..GROUP_LINES).filter(|&line| found[line] == NO_CODE) {
                let place = (group * GROUP_LINES + line) * LINE + word;
                exceptions.push(Exception {
                    step: step.try_into().expect("a panel has fewer steps"),
                    place: place.try_into().expect("a step is small"),
                    bits: lines[line][word],
                });
            }
        }
    }
    out
}

/// Whether so many exceptions are too many for a weight of so many elements.
pub(super) fn are_too_many(num_exceptions: usize, num_elements: usize) -> bool {
    num_exceptions * ELEMENTS_PER_EXCEPTION > num_elements
}

/// Where the low byte of an element lies in its step.
fn low_byte(element: usize) -> usize {
    let (line, word) = (element / LINE, element % LINE);
    2 * (line / 2 * LINE + word) + 1 - line % 2
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn part(words: &[u16], in_size: usize) -> Part {
        Part {
            weight: words.as_ptr().cast(),
            num_rows: words.len() / in_size,
            row_stride: in_size,
            bias: std::ptr::null(),
        }
    }

    /// The code for rows of so many words.
    fn choose(words: &[u16], in_size: usize) -> Option<Code> {
        // SAFETY: the part is whole.
        unsafe { Code::choose(Dtype::Bf16, in_size, &[part(words, in_size)]) }
    }

    proptest! {
        #[test]
        fn elements_come_back(mut words in prop::collection::vec(any::<u16>(), 3 * STEP_ELEMENTS), high in 0_u8..250) {
            // Four of five words share six high bytes, and zeros are frequent.
            for (idx, word) in words.iter_mut().enumerate() {
                match idx % 15 {
                    0..3 => {}
                    3 => *word = 0,
                    _ => *word = *word % (6 << 8) + (u16::from(high) << 8),
                }
            }
            let code = Code { high_bytes: std::array::from_fn(|idx| [0, 1, 2, 3, 4, 5].get(idx % 16).map_or(0, |code| high + code)) };
            let mut exceptions = Vec::new();
            let steps = words.as_chunks().0.iter().enumerate();
            let out: Vec<_> = steps.map(|(idx, step)| encode(&code.codes(), idx, step, &mut exceptions)).collect();
            let coding = Coding::new(code, std::iter::repeat_n(exceptions, 2));
            for panel in 0..2 {
                let exceptions = coding.exceptions(panel);
                prop_assert!(exceptions.is_sorted_by_key(|exception| exception.step));
                let mut found = 0;
                for (element, &word) in words.iter().enumerate() {
                    let mut exceptions = exceptions.iter().filter(|exception| exception.element() == element);
                    // SAFETY: the element is one of the panel.
                    let coded = unsafe { coding.code.element(out.as_ptr().cast(), element) };
                    let exception = exceptions.next();
                    prop_assert_eq!(exception.map_or(coded, |exception| exception.bits), word);
                    found += usize::from(exception.is_some());
                }
                prop_assert_eq!(found, exceptions.len());
            }
        }
    }

    #[test]
    fn weights_of_many_high_bytes_are_not_coded() {
        let narrow: Vec<u16> = (0..6400).map(|idx| 0x3c00 + idx % 0x600).collect();
        let code = choose(&narrow, 32).unwrap();
        assert!((0..6).all(|high| code.high_bytes.contains(&(0x3c + high))));
        assert!(code.high_bytes.contains(&0));
        let wide: Vec<u16> = (0..6400).map(|idx| idx * 10).collect();
        assert!(choose(&wide, 32).is_none());
    }
}
