// Small matrix products on row-major float32, held in vector registers; included by each kernel.
#pragma once

namespace {

typedef float vec __attribute__((vector_size(64), aligned(4)));
constexpr int LANES = 16;

// C[MR, NV*16] = A[MR, K] B[K, NV*16]; A is read with a row and a column stride, so it may be a transpose.
template <int MR, int NV>
void tile(const float * a, long a_row, long a_col, const float * b, long b_row, float * c, long c_row, long depth) {
    vec acc[MR][NV] = {};
    for (long k = 0; k < depth; k++) {
        vec row[NV];
        for (int j = 0; j < NV; j++) row[j] = *(const vec *) (b + k * b_row + j * LANES);
        for (int i = 0; i < MR; i++) {
            const float x = a[i * a_row + k * a_col];
            for (int j = 0; j < NV; j++) acc[i][j] += x * row[j];
        }
    }
    for (int i = 0; i < MR; i++)
        for (int j = 0; j < NV; j++) *(vec *) (c + i * c_row + j * LANES) = acc[i][j];
}

template <int NV>
void columns(long rows, long depth, const float * a, long a_row, long a_col, const float * b, long b_row, float * c,
             long c_row) {
    long i = 0;
    for (; i + 6 <= rows; i += 6) tile<6, NV>(a + i * a_row, a_row, a_col, b, b_row, c + i * c_row, c_row, depth);
    for (; i + 2 <= rows; i += 2) tile<2, NV>(a + i * a_row, a_row, a_col, b, b_row, c + i * c_row, c_row, depth);
    for (; i < rows; i++) tile<1, NV>(a + i * a_row, a_row, a_col, b, b_row, c + i * c_row, c_row, depth);
}

// C[rows, cols] = A[rows, depth] B[depth, cols]; cols is a multiple of 16; every matrix with its own row stride.
void multiply_wide(long rows, long cols, long depth, const float * a, long a_row, long a_col, const float * b,
                   long b_row, float * c, long c_row) {
    long j = 0;
    for (; j + 64 <= cols; j += 64) columns<4>(rows, depth, a, a_row, a_col, b + j, b_row, c + j, c_row);
    for (; j + 32 <= cols; j += 32) columns<2>(rows, depth, a, a_row, a_col, b + j, b_row, c + j, c_row);
    for (; j < cols; j += LANES) columns<1>(rows, depth, a, a_row, a_col, b + j, b_row, c + j, c_row);
}

// The same for B and C without gaps between their rows.
[[maybe_unused]] void multiply(long rows, long cols, long depth, const float * a, long a_row, long a_col,
                               const float * b, float * c) {
    multiply_wide(rows, cols, depth, a, a_row, a_col, b, cols, c, cols);
}

void transpose(long rows, long cols, const float * a, float * out) {
    for (long i = 0; i < rows; i++)
        for (long j = 0; j < cols; j++) out[j * rows + i] = a[i * cols + j];
}

}  // namespace
