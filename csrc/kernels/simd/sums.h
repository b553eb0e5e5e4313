// Sums of bytes, for AVX2 and up. Included by ISA-specific sources inside their namespace.

// The sums of the first and the second 16 of 32 signed bytes.
inline void sums_of_16(const int8_t* q, int32_t& first, int32_t& second) {
    const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(q));
    const __m256i pairs = _mm256_maddubs_epi16(_mm256_set1_epi8(1), bytes);
    const __m256i quads = _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
    const __m256i octets = _mm256_add_epi32(quads, _mm256_shuffle_epi32(quads, 0xB1));
    const __m256i sums = _mm256_add_epi32(octets, _mm256_shuffle_epi32(octets, 0x4E));
    first = _mm256_extract_epi32(sums, 0);
    second = _mm256_extract_epi32(sums, 4);
}
