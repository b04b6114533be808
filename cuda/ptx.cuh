// All inline PTX of the kernels: one thin wrapper an instruction, and the two element types that it converts.
//
// The kernels include no CUDA header, so that NVRTC alone compiles them, and quickly. What is written here, and
// nothing else, has to be checked against the PTX ISA manual by eye; tests/cuda_host executes it.
#pragma once

using uint8_t = unsigned char;
using uint16_t = unsigned short;
using uint32_t = unsigned int;
using int64_t = long long;
using uint64_t = unsigned long long;

struct bf16 {
  uint16_t bits;
};
struct half {
  uint16_t bits;
};

#define INLINE static __device__ __forceinline__

// ---- conversions: a register holds two elements, the first in its lower half

template <class T>
struct Numeric;

template <>
struct Numeric<bf16> {
  INLINE float2 widen(uint32_t pair) {
    return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
  }
  INLINE float widen(bf16 value) { return __uint_as_float(uint32_t(value.bits) << 16); }
  INLINE uint32_t narrow(float first, float second) {
    uint32_t pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
    return pair;
  }
  // d += a * b: a is 16 rows x 16, b is 16 x 8 columns, d is 16 x 8 in float32.
  INLINE void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
};

template <>
struct Numeric<half> {
  INLINE float2 widen(uint32_t pair) {
    float2 value;
    asm("{ .reg .b16 low, high; mov.b32 {low, high}, %2; cvt.f32.f16 %0, low; cvt.f32.f16 %1, high; }"
        : "=f"(value.x), "=f"(value.y)
        : "r"(pair));
    return value;
  }
  INLINE float widen(half value) {
    float wide;
    asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(value.bits));
    return wide;
  }
  INLINE uint32_t narrow(float first, float second) {
    uint32_t pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
    return pair;
  }
  INLINE void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
};

// ---- arithmetic

INLINE float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

INLINE float log2_fast(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// The bytes of a register in another order: nibble i of `order` names the source of byte i.
INLINE uint32_t permute_bytes(uint32_t bytes, uint32_t order) {
  uint32_t result;
  asm("prmt.b32 %0, %1, 0, %2;" : "=r"(result) : "r"(bytes), "r"(order));
  return result;
}

// ---- shared memory

INLINE uint32_t shared_address(const void* pointer) { return uint32_t(__cvta_generic_to_shared(pointer)); }

// Loads four 8 x 8 matrices of 16-bit elements. Lane l names a row of matrix l / 8. Register m of lane l receives
// elements 2 * (l % 4) and the next of row l / 4 of matrix m; transposed, of its column l / 4.
template <bool TRANSPOSED>
INLINE void load_matrices(uint32_t (&r)[4], const void* row) {
  if constexpr (TRANSPOSED) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(row))
                 : "memory");
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(row))
                 : "memory");
  }
}

// The same for two matrices; lanes 0..15 name their rows.
template <bool TRANSPOSED>
INLINE void load_matrices(uint32_t (&r)[2], const void* row) {
  if constexpr (TRANSPOSED) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];"
                 : "=r"(r[0]), "=r"(r[1])
                 : "r"(shared_address(row))
                 : "memory");
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1}, [%2];"
                 : "=r"(r[0]), "=r"(r[1])
                 : "r"(shared_address(row))
                 : "memory");
  }
}

// ---- copies into shared memory that run beside the computation

// Copies 16 bytes, or writes 16 zero bytes without reading the source if it is not valid.
INLINE void copy_async(void* shared, const void* global, bool valid) {
  int num_bytes = valid ? 16 : 0;
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;"
               :
               : "r"(shared_address(shared)), "l"(global), "r"(num_bytes)
               : "memory");
}

INLINE void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most `PENDING` of this thread's newest groups are still under way.
template <int PENDING>
INLINE void copy_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// ---- copies of many bytes by one thread, and barriers that count the bytes which arrived (sm_90 and newer)

#if __CUDA_ARCH__ >= 900
INLINE void mbarrier_init(uint64_t* barrier, int num_arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(num_arrivals) : "memory");
}

// Makes initialised barriers visible to the unit that copies.
INLINE void mbarrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

INLINE void mbarrier_arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

// Arrives, and lets the phase end only when so many more bytes have been copied.
INLINE void mbarrier_arrive_and_expect(uint64_t* barrier, int num_bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(num_bytes)
               : "memory");
}

// Waits until the phase of this parity has ended.
INLINE void mbarrier_wait(uint64_t* barrier, uint32_t parity) {
  uint32_t ended;
  do {
    asm volatile(
        "{ .reg .pred ended; mbarrier.try_wait.parity.shared::cta.b64 ended, [%1], %2; selp.u32 %0, 1, 0, ended; }"
        : "=r"(ended)
        : "r"(shared_address(barrier)), "r"(parity)
        : "memory");
  } while (!ended);
}

INLINE void copy_bulk(void* shared, const void* global, int num_bytes, uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
          shared_address(shared)),
      "l"(global), "r"(num_bytes), "r"(shared_address(barrier))
      : "memory");
}
#endif
