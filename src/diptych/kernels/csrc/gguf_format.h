// The quantised blocks of GGUF files, and the order in which the kernels keep them.
//
// Every format is the same idea: small integer codes, a value for each code, and for every 16 or 32 inputs of a row a scale
// (and in some an offset): weight = scale * value[code] + offset. In the K formats 256 inputs share a float16 scale, which an
// integer of few bits multiplies for each 16 or 32 of them.
//
// Packed order: blocks of 16 outputs. First their codes, in cells of 32 inputs; then their scales. A cell of codes of n bits is
// n vectors of 32 words: a word for each output and parity of the input, and in every word as many whole codes as it holds,
// each of another pair of inputs. So shifting a vector right brings a pair of inputs of all outputs to the bottom, in the order
// of linear.h. The bits that are left at the top of the words make the codes of the last pairs (CodePlaces). Codes of 8 bits are
// bytes instead: [pair][parity][output]. No bit is added but for the K formats' small integers, which take a byte each.
#pragma once

#include "abi.h"

namespace diptych {
namespace {

struct FormatShape {
  int code_bits;
  int scale_inputs;      // inputs that share a scale
  bool has_offset;
  bool has_super_scale;  // 256 inputs share float16 factors of the scales
  int file_inputs;       // inputs of one block of the file
  int file_nbytes;       // and its bytes
};

constexpr FormatShape shape_of(GgufFormat format) {
  switch (format) {
    case GgufFormat::kQ4_0: return {4, 32, false, false, 32, 18};
    case GgufFormat::kQ4_1: return {4, 32, true, false, 32, 20};
    case GgufFormat::kQ5_0: return {5, 32, false, false, 32, 22};
    case GgufFormat::kQ5_1: return {5, 32, true, false, 32, 24};
    case GgufFormat::kQ8_0: return {8, 32, false, false, 32, 34};
    case GgufFormat::kQ2_K: return {2, 16, true, true, 256, 84};
    case GgufFormat::kQ3_K: return {3, 16, false, true, 256, 110};
    case GgufFormat::kQ4_K: return {4, 32, true, true, 256, 144};
    case GgufFormat::kQ5_K: return {5, 32, true, true, 256, 176};
    case GgufFormat::kQ6_K: return {6, 16, false, true, 256, 210};
    case GgufFormat::kIQ4_NL: return {4, 32, false, false, 32, 18};
    case GgufFormat::kIQ4_XS: return {4, 32, false, true, 256, 136};
  }
  return {};
}

constexpr int kIq4Values[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

// What a code stands for, before it is scaled: an integer that bfloat16 holds exactly.
constexpr int value_of(GgufFormat format, int code) {
  switch (format) {
    case GgufFormat::kQ4_0: return code - 8;
    case GgufFormat::kQ5_0: return code - 16;
    case GgufFormat::kQ3_K: return code - 4;
    case GgufFormat::kQ6_K: return code - 32;
    case GgufFormat::kIQ4_NL:
    case GgufFormat::kIQ4_XS: return kIq4Values[code % 16];
    default: return code;
  }
}

constexpr int64_t kCellInputs = 32;
constexpr int64_t kSuperInputs = 256;
constexpr int64_t kGgufBlockOutputs = 16;
constexpr int64_t kVectorNbytes = 64;

// Where the codes of a cell's 16 pairs lie. Whole ones: vector pair / per_word, shifted by pair % per_word * bits. Of 3 or 5
// bits, those of the last pair have a bit in every vector; of 6 bits, those of the last four have four bits in one, and two in
// another.
struct CodePlaces {
  int bits;

  constexpr int per_word() const { return 16 / bits; }
  constexpr int num_whole() const { return bits * per_word(); }
  constexpr bool is_whole(int pair) const { return pair < num_whole(); }
  constexpr int vector(int pair) const { return pair / per_word(); }
  constexpr int shift(int pair) const { return pair % per_word() * bits; }

  // Of pair num_whole() + index, 6 bits a code.
  static constexpr int kLowBits = 4;
  static constexpr int kLowShift = 12;
  static constexpr int low_vector(int index) { return index; }
  static constexpr int high_vector(int index) { return 4 + index / 2; }
  static constexpr int high_shift(int index) { return 12 + index % 2 * 2; }
};

constexpr int64_t cell_nbytes(const FormatShape& shape) { return shape.code_bits * kVectorNbytes; }

// Bytes of the scales of 256 inputs, or of 32 where these share none.
constexpr int64_t scale_group_nbytes(const FormatShape& shape) {
  const int64_t factors = shape.has_offset ? 2 : 1;
  const int64_t halves = factors * kGgufBlockOutputs * 2;
  return shape.has_super_scale ? halves + factors * kGgufBlockOutputs * (kSuperInputs / shape.scale_inputs) : halves;
}

constexpr int64_t codes_nbytes(const FormatShape& shape, int64_t in_features) {
  return in_features / kCellInputs * cell_nbytes(shape);
}

constexpr int64_t block_nbytes(const FormatShape& shape, int64_t in_features) {
  const int64_t num_groups = in_features / (shape.has_super_scale ? kSuperInputs : kCellInputs);
  const int64_t nbytes = codes_nbytes(shape, in_features) + num_groups * scale_group_nbytes(shape);
  return (nbytes + kVectorNbytes - 1) / kVectorNbytes * kVectorNbytes;
}

}  // namespace
}  // namespace diptych
