// The passes of the ConvModel's training step over its pixels, for a CPU with AVX-512 and bf16.
//
// Every thread takes blocks of `ROWS` pixels, and finishes a block before it begins the next: what
// goes into a product is made in the cache right before it, and its sums are taken right after it.
// Matrices are (pixels, channels), row by row; the right side of a product has the numbers of two
// rows next to each other, as the instructions want them: (rows / 2, columns, 2).
// An elementwise function is called for 16 channels, whose constants it loads, and gives a function
// of the pixel. Each thread adds to sums of its own.

#include <ATen/native/CPUBlas.h>
#include <immintrin.h>
#include <omp.h>

#include <algorithm>
#include <exception>
#include <initializer_list>
#include <vector>

using BFloat16 = at::BFloat16;
using Vector = __m512;  // 16 channels
using Reads = std::initializer_list<const BFloat16*>;  // what of memory a pass reads
using at::native::cpublas::brgemm;

namespace {

constexpr int64_t ROWS = 32;   // pixels of a product whose result stays in the L1 cache
constexpr int64_t TILE = 256;  // pixels added to the weights' gradient at once

struct Shape {
  int64_t pixels, channels, threads;
};

Vector load(const float* p) { return _mm512_loadu_ps(p); }
Vector load(const BFloat16* p) {
  __m256i low = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(low), 16));
}
void add(float* p, Vector v) { _mm512_storeu_ps(p, load(p) + v); }
__m512i narrow(Vector low, Vector high) { return (__m512i)_mm512_cvtne2ps_pbh(high, low); }
Vector fma(Vector a, Vector b, Vector c) { return _mm512_fmadd_ps(a, b, c); }
Vector relu(Vector v) { return _mm512_max_ps(v, _mm512_setzero_ps()); }
Vector fill(float number) { return _mm512_set1_ps(number); }
__mmask16 positive(Vector v) {
  return _mm512_cmp_ps_mask(v, _mm512_setzero_ps(), _CMP_GT_OQ);
}

// The numbers of two rows next to each other: r0 s0 r1 s1 …, from r0 r1 … s0 s1 …
__m512i in_pairs(__m512i rows) {
  const __m512i order = _mm512_set_epi16(
      31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8,
      23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  return _mm512_permutexvar_epi16(order, rows);
}

// Transpose 16 x 16 numbers of 32 bits.
void transpose(__m512i (&m)[16]) {
  __m512i t[16];
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(m[i], m[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(m[i], m[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {  // now m[i + j] has columns j, 4 + j, … of four rows
    m[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    m[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    m[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    m[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  for (int j = 0; j < 4; j++) {
    __m512i even = _mm512_shuffle_i32x4(m[j], m[4 + j], 0x88);
    __m512i even_low = _mm512_shuffle_i32x4(m[8 + j], m[12 + j], 0x88);
    __m512i odd = _mm512_shuffle_i32x4(m[j], m[4 + j], 0xdd);
    __m512i odd_low = _mm512_shuffle_i32x4(m[8 + j], m[12 + j], 0xdd);
    t[j] = _mm512_shuffle_i32x4(even, even_low, 0x88);
    t[4 + j] = _mm512_shuffle_i32x4(odd, odd_low, 0x88);
    t[8 + j] = _mm512_shuffle_i32x4(even, even_low, 0xdd);
    t[12 + j] = _mm512_shuffle_i32x4(odd, odd_low, 0xdd);
  }
  std::copy(t, t + 16, m);
}

// Past the caches: nobody reads it before this pass is over.
void stream(BFloat16* p, Vector low, Vector high) {
  _mm512_stream_si512(reinterpret_cast<__m512i*>(p), narrow(low, high));
}

// Ask for the rows of a block, which come while the product of the one before keeps the core busy.
void prefetch(Shape s, Reads matrices, int64_t row) {
  for (const BFloat16* m : matrices)
    for (int64_t i = row * s.channels; i < (row + ROWS) * s.channels; i += 32)
      _mm_prefetch(reinterpret_cast<const char*>(m + i), _MM_HINT_T1);
}

template <class Work>
void in_threads(Shape s, Work work) {
#pragma omp parallel num_threads(s.threads)
  {
    int64_t thread = omp_get_thread_num(), blocks = s.pixels / ROWS, of = omp_get_num_threads();
    work(thread, blocks * thread / of * ROWS, blocks * (thread + 1) / of * ROWS);
    at::native::cpublas::brgemm_release();
  }
}

// relu(z * scale + shift)
auto normalised(Shape s, const BFloat16* z, const float* affine) {
  return [=](int64_t c) {
    Vector scale = load(affine + c), shift = load(affine + s.channels + c);
    return [=](int64_t p) { return relu(fma(load(z + p * s.channels + c), scale, shift)); };
  };
}

// The first layer, from the two coordinates of each pixel.
auto first(Shape s, const float* x, const float* affine) {
  return [=](int64_t c) {
    Vector w0 = load(affine + c), w1 = load(affine + s.channels + c);
    Vector shift = load(affine + 2 * s.channels + c);
    return [=](int64_t p) {
      return relu(fma(fill(x[p]), w0, fma(fill(x[s.pixels + p]), w1, shift)));
    };
  };
}

// z = activation @ weight, and the sums of z and of its squares.
template <class Activation>
void layer(Shape s, Reads reads, Activation activation, const BFloat16* weight, BFloat16* z,
           float* sums) {
  const int64_t C = s.channels;
  in_threads(s, [=](int64_t thread, int64_t begin, int64_t end) {
    std::vector<BFloat16> a(ROWS * C);
    std::vector<float> out(ROWS * C);
    float *sum = sums + thread * 2 * C, *square = sum + C;
    for (int64_t p = begin; p < end; p += ROWS) {
      for (int64_t c = 0; c < C; c += 32) {
        auto low = activation(c), high = activation(c + 16);
        for (int64_t r = 0; r < ROWS; r++)
          _mm512_storeu_si512(&a[r * C + c], narrow(low(p + r), high(p + r)));
      }
      if (p + ROWS < end) prefetch(s, reads, p + ROWS);
      brgemm(ROWS, C, C, C, C, C, false, a.data(), weight, out.data());
      for (int64_t c = 0; c < C; c += 32) {
        Vector sum0 = fill(0), sum1 = fill(0), square0 = fill(0), square1 = fill(0);
        for (int64_t r = 0; r < ROWS; r++) {
          Vector low = load(&out[r * C + c]), high = load(&out[r * C + c + 16]);
          stream(z + (p + r) * C + c, low, high);
          sum0 += low, sum1 += high;
          square0 = fma(low, low, square0), square1 = fma(high, high, square1);
        }
        add(sum + c, sum0), add(sum + c + 16, sum1);
        add(square + c, square0), add(square + c + 16, square1);
      }
    }
  });
}

// With dz, the gradient of a layer's output: the gradient of its weights, and for each 16 channels
// what `finish` makes of the gradient of its input, and adds to N sums; written to `out`, if any.
template <int N, class Gradient, class Activation, class Finish>
void backward(Shape s, Reads reads, Gradient gradient, Activation activation,
              const BFloat16* weight, Finish finish, BFloat16* out, float* weight_gradients,
              float* sums) {
  // The right side of the product for dw lies in panels of so many columns: 64 is fastest.
  const int64_t C = s.channels, wide = C % 64 ? 32 : 64, transposed_row = TILE + 32;
  in_threads(s, [=](int64_t thread, int64_t begin, int64_t end) {
    std::vector<BFloat16> dz(TILE * C), dz_transposed(C * transposed_row), a(TILE * C);
    std::vector<float> da(ROWS * C);
    float *dw = weight_gradients + thread * C * C, *sum = sums + thread * N * C;
    for (int64_t tile = begin; tile < end; tile += TILE) {
      const int64_t rows = std::min(TILE, end - tile);
      for (int64_t row = 0; row < rows; row += ROWS) {
        for (int64_t c = 0; c < C; c += 16) {
          auto dz_of = gradient(c);
          auto a_of = activation(c);
          BFloat16* panel = &a[c / wide * TILE * wide + row * wide + c % wide * 2];
          __m512i pairs[16];
          for (int64_t i = 0; i < 16; i++) {
            int64_t p = tile + row + 2 * i;
            __m512i both = narrow(dz_of(p), dz_of(p + 1));
            BFloat16* to = &dz[(row + 2 * i) * C + c];
            _mm256_storeu_si256((__m256i*)to, _mm512_castsi512_si256(both));
            _mm256_storeu_si256((__m256i*)(to + C), _mm512_extracti64x4_epi64(both, 1));
            pairs[i] = in_pairs(both);
            __m512i as = in_pairs(narrow(a_of(p), a_of(p + 1)));
            _mm512_storeu_si512(panel + 2 * i * wide, as);
          }
          transpose(pairs);
          for (int64_t i = 0; i < 16; i++)
            _mm512_storeu_si512(&dz_transposed[(c + i) * transposed_row + row], pairs[i]);
        }
        if (tile + row + ROWS < end) prefetch(s, reads, tile + row + ROWS);
        brgemm(ROWS, C, C, C, C, C, false, &dz[row * C], weight, da.data());
        for (int64_t c = 0; c < C; c += 32) {
          auto finish_low = finish(c), finish_high = finish(c + 16);
          Vector low[N] = {}, high[N] = {};
          for (int64_t r = 0; r < ROWS; r++) {
            int64_t p = tile + row + r;
            Vector g_low = finish_low(p, load(&da[r * C + c]), low);
            Vector g_high = finish_high(p, load(&da[r * C + c + 16]), high);
            if (out) stream(out + p * C + c, g_low, g_high);
          }
          for (int i = 0; i < N; i++) {
            add(sum + i * C + c, low[i]);
            add(sum + i * C + c + 16, high[i]);
          }
        }
      }
      for (int64_t c = 0; c < C; c += wide)
        brgemm(C, wide, rows, transposed_row, wide, C, true, dz_transposed.data(), &a[c * TILE],
               dw + c);
    }
  });
}

}  // namespace

extern "C" {

// Whether torch has the products here: in a thread of a pass their error could not be caught.
bool has_products() {
  std::vector<BFloat16> a(ROWS * ROWS), b(ROWS * ROWS);
  std::vector<float> c(ROWS * ROWS);
  try {
    brgemm(ROWS, ROWS, ROWS, ROWS, ROWS, ROWS, false, a.data(), b.data(), c.data());
    at::native::cpublas::brgemm_release();
  } catch (const std::exception&) {
    return false;
  }
  return true;
}

void forward2(Shape s, const float* x, const float* affine1, const BFloat16* weight, BFloat16* z2,
              float* sums) {
  layer(s, {}, first(s, x, affine1), weight, z2, sums);
}

void forward3(Shape s, const BFloat16* z2, const float* affine2, const BFloat16* weight,
              BFloat16* z3, float* sums) {
  layer(s, {z2}, normalised(s, z2, affine2), weight, z3, sums);
}

// The last layer and the loss. `rows3`: scale, shift, weight. Sums over the pixels whose ReLU is
// open: dy, dy * z; and at [2][0] of all squared errors.
void head(Shape s, const BFloat16* z3, const float* rows3, const float* bias, const float* target,
          float* dy, float* sums) {
  const int64_t C = s.channels;
  const float *scale = rows3, *shift = rows3 + C, *weight = rows3 + 2 * C;
  in_threads(s, [=](int64_t thread, int64_t begin, int64_t end) {
    float* sum = sums + thread * 3 * C;
    for (int64_t p = begin; p < end; p += ROWS) {
      if (p + ROWS < end) prefetch(s, {z3}, p + ROWS);
      for (int64_t r = p; r < p + ROWS; r += 4) {
        Vector y[4] = {};
        for (int64_t c = 0; c < C; c += 16)
          for (int i = 0; i < 4; i++) {
            Vector z = load(z3 + (r + i) * C + c);
            y[i] = fma(relu(fma(z, load(scale + c), load(shift + c))), load(weight + c), y[i]);
          }
        for (int i = 0; i < 4; i++) {
          float error = _mm512_reduce_add_ps(y[i]) + *bias - target[r + i];
          dy[r + i] = error * 2 / s.pixels;
          sum[2 * C] += error * error;
        }
      }
      for (int64_t c = 0; c < C; c += 16) {
        Vector d = fill(0), dz = fill(0);
        for (int64_t r = p; r < p + ROWS; r++) {
          Vector z = load(z3 + r * C + c);
          __mmask16 open = positive(fma(z, load(scale + c), load(shift + c)));
          Vector g = _mm512_maskz_mov_ps(open, fill(dy[r]));
          d += g, dz = fma(g, z, dz);
        }
        add(sum + c, d), add(sum + C + c, dz);
      }
    }
  });
}

// `rows3`: scale, shift, the last weight times what the gradient is multiplied with, what z is
// multiplied with, constant.
void backward3(Shape s, const BFloat16* z2, const BFloat16* z3, const float* dy,
               const float* affine2, const float* rows3, const BFloat16* weight, BFloat16* g2,
               float* dw, float* sums) {
  const int64_t C = s.channels;
  auto gradient = [=](int64_t c) {
    Vector scale = load(rows3 + c), shift = load(rows3 + C + c), of_g = load(rows3 + 2 * C + c);
    Vector of_z = load(rows3 + 3 * C + c), constant = load(rows3 + 4 * C + c);
    return [=](int64_t p) {
      Vector z = load(z3 + p * C + c), rest = fma(z, of_z, constant);
      return _mm512_mask3_fmadd_ps(fill(dy[p]), of_g, rest, positive(fma(z, scale, shift)));
    };
  };
  auto finish = [=](int64_t c) {
    Vector scale = load(affine2 + c), shift = load(affine2 + C + c);
    return [=](int64_t p, Vector da, Vector* total) {
      Vector z = load(z2 + p * C + c);
      Vector g = _mm512_maskz_mov_ps(positive(fma(z, scale, shift)), da);
      total[0] += g, total[1] = fma(g, z, total[1]);
      return g;
    };
  };
  auto activation = normalised(s, z2, affine2);
  backward<2>(s, {z2, z3}, gradient, activation, weight, finish, g2, dw, sums);
}

// `rows2`: what the gradient and z are multiplied with, constant.
void backward2(Shape s, const BFloat16* g2, const BFloat16* z2, const float* x,
               const float* affine1, const float* rows2, const BFloat16* weight, float* dw,
               float* sums) {
  const int64_t C = s.channels;
  auto gradient = [=](int64_t c) {
    Vector of_g = load(rows2 + c), of_z = load(rows2 + C + c), constant = load(rows2 + 2 * C + c);
    return [=](int64_t p) {
      int64_t at = p * C + c;
      return fma(load(g2 + at), of_g, fma(load(z2 + at), of_z, constant));
    };
  };
  auto activation = first(s, x, affine1);
  auto finish = [=](int64_t c) {
    auto a_of = activation(c);
    return [=](int64_t p, Vector da, Vector* total) {
      Vector g = _mm512_maskz_mov_ps(positive(a_of(p)), da);
      total[0] += g;
      total[1] = fma(g, fill(x[p]), total[1]);
      total[2] = fma(g, fill(x[s.pixels + p]), total[2]);
      return g;
    };
  };
  backward<3>(s, {g2, z2}, gradient, activation, weight, finish, nullptr, dw, sums);
}
}
