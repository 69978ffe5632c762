// Brings a GGUF file's blocks into the order of gguf_format.h: bits are moved, none is rounded.
#include <cstring>

#include "gguf_format.h"
#include "thread_pool.h"

namespace diptych {
namespace {

// One block of a file, taken apart. Formats without common factors have one scale, and maybe one offset.
struct FileBlock {
  uint8_t codes[kSuperInputs];
  uint16_t scale;
  uint16_t offset;
  int8_t small_scales[16];
  int8_t small_offsets[16];
};

uint16_t read_half(const uint8_t* from) { return static_cast<uint16_t>(from[0] | from[1] << 8); }

// Low nibbles are the first `half` inputs, high ones the next.
void read_nibbles(uint8_t* codes, const uint8_t* from, int half) {
  for (int i = 0; i < half; ++i) {
    codes[i] = from[i] & 15;
    codes[half + i] = from[i] >> 4;
  }
}

void add_fifth_bits(uint8_t* codes, const uint8_t* from) {
  for (int i = 0; i < 32; ++i) codes[i] |= static_cast<uint8_t>((from[i / 8] >> (i % 8) & 1) << 4);
}

// Q4_0, Q4_1, Q5_0, Q5_1 and IQ4_NL.
void read_simple(FileBlock& block, const uint8_t* from, const FormatShape& shape) {
  block.scale = read_half(from);
  from += 2;
  if (shape.has_offset) {
    block.offset = read_half(from);
    from += 2;
  }
  const uint8_t* fifth_bits = from;
  if (shape.code_bits == 5) from += 4;
  read_nibbles(block.codes, from, 16);
  if (shape.code_bits == 5) add_fifth_bits(block.codes, fifth_bits);
}

// Q2_K and Q3_K: byte l of a half holds inputs l, l + 32, l + 64 and l + 96 of it.
void read_quarters(uint8_t* codes, const uint8_t* from) {
  for (int i = 0; i < kSuperInputs; ++i)
    codes[i] = from[i / 128 * 32 + i % 32] >> (i % 128 / 32 * 2) & 3;
}

void read_q2_k(FileBlock& block, const uint8_t* from) {
  for (int i = 0; i < 16; ++i) {
    block.small_scales[i] = static_cast<int8_t>(from[i] & 15);
    block.small_offsets[i] = static_cast<int8_t>(from[i] >> 4);
  }
  read_quarters(block.codes, from + 16);
  block.scale = read_half(from + 80);
  block.offset = read_half(from + 82);
}

void read_q3_k(FileBlock& block, const uint8_t* from) {
  const uint8_t* high_bits = from;
  const uint8_t* scales = from + 96;
  read_quarters(block.codes, from + 32);
  for (int i = 0; i < kSuperInputs; ++i)
    block.codes[i] |= static_cast<uint8_t>((high_bits[i % 32] >> (i / 32) & 1) << 2);
  for (int i = 0; i < 16; ++i) {
    const int low = i < 8 ? scales[i] & 15 : scales[i - 8] >> 4;
    const int high = scales[8 + i % 4] >> (i / 4 * 2) & 3;
    block.small_scales[i] = static_cast<int8_t>((low | high << 4) - 32);
  }
  block.scale = read_half(from + 108);
}

// Q4_K and Q5_K: eight scales and eight offsets of 6 bits in 12 bytes.
void read_six_bit_pairs(FileBlock& block, const uint8_t* from) {
  for (int i = 0; i < 4; ++i) {
    block.small_scales[i] = static_cast<int8_t>(from[i] & 63);
    block.small_offsets[i] = static_cast<int8_t>(from[i + 4] & 63);
    block.small_scales[i + 4] = static_cast<int8_t>((from[i + 8] & 15) | from[i] >> 6 << 4);
    block.small_offsets[i + 4] = static_cast<int8_t>(from[i + 8] >> 4 | from[i + 4] >> 6 << 4);
  }
}

void read_q4_k_or_q5_k(FileBlock& block, const uint8_t* from, bool has_fifth_bits) {
  block.scale = read_half(from);
  block.offset = read_half(from + 2);
  read_six_bit_pairs(block, from + 4);
  const uint8_t* fifth_bits = from + 16;
  const uint8_t* nibbles = has_fifth_bits ? from + 48 : from + 16;
  for (int part = 0; part < 4; ++part) read_nibbles(block.codes + part * 64, nibbles + part * 32, 32);
  if (!has_fifth_bits) return;
  for (int i = 0; i < kSuperInputs; ++i)
    block.codes[i] |= static_cast<uint8_t>((fifth_bits[i % 32] >> (i / 32) & 1) << 4);
}

void read_q6_k(FileBlock& block, const uint8_t* from) {
  const uint8_t* high_bits = from + 128;
  for (int i = 0; i < kSuperInputs; ++i) {
    const int half = i / 128, quarter = i % 128 / 32, at = i % 32;
    const uint8_t nibbles = from[half * 64 + quarter % 2 * 32 + at];
    const int low = quarter < 2 ? nibbles & 15 : nibbles >> 4;
    const int high = high_bits[half * 32 + at] >> (quarter * 2) & 3;
    block.codes[i] = static_cast<uint8_t>(low | high << 4);
  }
  std::memcpy(block.small_scales, from + 192, 16);
  block.scale = read_half(from + 208);
}

void read_iq4_xs(FileBlock& block, const uint8_t* from) {
  block.scale = read_half(from);
  const uint16_t high = read_half(from + 2);
  for (int i = 0; i < 8; ++i) {
    const int low = from[4 + i / 2] >> (i % 2 * 4) & 15;
    block.small_scales[i] = static_cast<int8_t>((low | (high >> (i * 2) & 3) << 4) - 32);
    read_nibbles(block.codes + i * 32, from + 8 + i * 16, 16);
  }
}

void read_block(FileBlock& block, const uint8_t* from, GgufFormat format, const FormatShape& shape) {
  switch (format) {
    case GgufFormat::kQ8_0:
      block.scale = read_half(from);
      std::memcpy(block.codes, from + 2, 32);
      return;
    case GgufFormat::kQ2_K: return read_q2_k(block, from);
    case GgufFormat::kQ3_K: return read_q3_k(block, from);
    case GgufFormat::kQ4_K:
    case GgufFormat::kQ5_K: return read_q4_k_or_q5_k(block, from, format == GgufFormat::kQ5_K);
    case GgufFormat::kQ6_K: return read_q6_k(block, from);
    case GgufFormat::kIQ4_XS: return read_iq4_xs(block, from);
    default: return read_simple(block, from, shape);
  }
}

void add_bits(uint8_t* word, unsigned bits) {
  word[0] |= static_cast<uint8_t>(bits);
  word[1] |= static_cast<uint8_t>(bits >> 8);
}

// Writes the code of input i of the cell, for one of 16 outputs.
void put_code(uint8_t* cell, int64_t output, int64_t i, int code, int code_bits) {
  const int pair = static_cast<int>(i / 2);
  const int64_t parity = i % 2;
  if (code_bits == 8) {
    cell[pair * 32 + parity * 16 + output] = static_cast<uint8_t>(code);
    return;
  }
  const CodePlaces places = {code_bits};
  const unsigned bits = static_cast<unsigned>(code);
  uint8_t* words = cell + (output * 2 + parity) * 2;
  if (places.is_whole(pair)) return add_bits(words + places.vector(pair) * kVectorNbytes, bits << places.shift(pair));
  if (code_bits == 6) {
    const int index = pair - places.num_whole();
    add_bits(words + places.low_vector(index) * kVectorNbytes, (bits & 15) << places.kLowShift);
    add_bits(words + places.high_vector(index) * kVectorNbytes, bits >> places.kLowBits << places.high_shift(index));
    return;
  }
  for (int bit = 0; bit < code_bits; ++bit) add_bits(words + bit * kVectorNbytes, (bits >> bit & 1) << 15);
}

void put_half(uint8_t* to, int64_t output, uint16_t half) { std::memcpy(to + output * 2, &half, 2); }

void put_scales(uint8_t* group, int64_t output, const FileBlock& block, const FormatShape& shape) {
  put_half(group, output, block.scale);
  group += kGgufBlockOutputs * 2;
  if (shape.has_offset) {
    put_half(group, output, block.offset);
    group += kGgufBlockOutputs * 2;
  }
  if (!shape.has_super_scale) return;
  const int num_scales = static_cast<int>(kSuperInputs) / shape.scale_inputs;
  for (int i = 0; i < num_scales; ++i) {
    std::memcpy(group + i * kGgufBlockOutputs + output, block.small_scales + i, 1);
    if (shape.has_offset)
      std::memcpy(group + (num_scales + i) * kGgufBlockOutputs + output, block.small_offsets + i, 1);
  }
}

// One output's row of the file into its place in a packed block.
void put_row(uint8_t* packed, const uint8_t* row, int64_t output, int64_t in_features, GgufFormat format) {
  const FormatShape shape = shape_of(format);
  uint8_t* scales = packed + codes_nbytes(shape, in_features);
  FileBlock block = {};
  for (int64_t index = 0; index < in_features / shape.file_inputs; ++index) {
    read_block(block, row + index * shape.file_nbytes, format, shape);
    put_scales(scales + index * scale_group_nbytes(shape), output, block, shape);
    for (int64_t i = 0; i < shape.file_inputs; ++i) {
      const int64_t input = index * shape.file_inputs + i;
      uint8_t* cell = packed + input / kCellInputs * cell_nbytes(shape);
      put_code(cell, output, input % kCellInputs, block.codes[i], shape.code_bits);
    }
  }
}

}  // namespace
}  // namespace diptych

// Bytes of 16 packed outputs; 0 for a format that there is no kernel for, or rows that are no whole blocks of the file.
DIPTYCH_EXPORT int64_t diptych_gguf_block_nbytes(int32_t format, int64_t in_features) {
  const diptych::FormatShape shape = diptych::shape_of(static_cast<GgufFormat>(format));
  if (shape.file_inputs == 0 || in_features % shape.file_inputs != 0) return 0;
  return diptych::block_nbytes(shape, in_features);
}

// Packs outputs 0..num_outputs, of which output i is row order[i] of the file's tensor. `packed` holds whole blocks of 16.
DIPTYCH_EXPORT void diptych_gguf_pack(void* packed, const void* rows, const int64_t* order, int64_t num_outputs,
                                      int64_t in_features, int32_t format) {
  const GgufFormat kind = static_cast<GgufFormat>(format);
  const diptych::FormatShape shape = diptych::shape_of(kind);
  const int64_t nbytes = diptych::block_nbytes(shape, in_features);
  const int64_t row_nbytes = in_features / shape.file_inputs * shape.file_nbytes;
  const int64_t num_blocks = (num_outputs + diptych::kGgufBlockOutputs - 1) / diptych::kGgufBlockOutputs;
  diptych::parallel_for(num_blocks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t index = begin; index < end; ++index) {
      uint8_t* block = static_cast<uint8_t*>(packed) + index * nbytes;
      std::memset(block, 0, static_cast<size_t>(nbytes));
      for (int64_t output = 0; output < diptych::kGgufBlockOutputs; ++output) {
        const int64_t at = index * diptych::kGgufBlockOutputs + output;
        if (at >= num_outputs) break;
        diptych::put_row(block, static_cast<const uint8_t*>(rows) + order[at] * row_nbytes, output, in_features, kind);
      }
    }
  });
}
