// 2^x for any SIMD header. Included by ISA-specific sources inside their namespace.

// Within 2 units in the last place for x in [-126, 126]; exactly 0 from -151 down.
inline Float float_exp2(Float x) {
    x = float_max(x, float_splat(-200.0f));  // also of -inf: 2^-200 is zero in float
    const Float whole = float_round(x);
    const Float t = float_sub(x, whole);  // [-0.5, 0.5]
    // Taylor coefficients ln(2)^n / n!; the remainder at 0.5 is under 1e-8.
    Float p = float_splat(1.5252733804e-5f);
    p = float_fma(p, t, float_splat(1.5403530394e-4f));
    p = float_fma(p, t, float_splat(1.3333558147e-3f));
    p = float_fma(p, t, float_splat(9.6181291077e-3f));
    p = float_fma(p, t, float_splat(5.5504108665e-2f));
    p = float_fma(p, t, float_splat(2.4022650696e-1f));
    p = float_fma(p, t, float_splat(6.9314718056e-1f));
    p = float_fma(p, t, float_splat(1.0f));
    return float_scale_power(p, whole);
}
