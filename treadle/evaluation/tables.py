"""The results of `treadle eval` in words."""

from __future__ import annotations

from treadle.bench.report import markdown_table
from treadle.evaluation.run import Report, Side
from treadle.evaluation.scores import Divergence, Estimate


def report_table(report: Report) -> str:
    """Two Markdown tables: what was compared, and the numbers."""
    result = report.result
    rows: list[tuple[str, str]] = [("tokens predicted", str(result.tokens))]
    if isinstance(result, Divergence):
        rows += [
            ("mean KL divergence, nats", str(result.kl)),
            *((f"KL, {p} % of tokens below", f"{value:.3g}") for p, value in result.percentiles.items()),
            ("same most likely token, %", str(_percent(result.top1))),
            ("perplexity", str(result.perplexity)),
            ("perplexity of the reference", str(result.reference_perplexity)),
            ("perplexity against it, %", f"{100 * (result.ratio.value - 1):+.2f} ± "
             f"{100 * result.ratio.error:.2f}"),
        ]  # fmt: skip
    else:
        rows += [("perplexity", str(result.perplexity)), ("nats per token", str(result.nll))]
    how = f"{report.text}, {report.context} tokens at once, {report.stride} of them new"
    lines = [f"model      {describe(report.model)}"]
    if report.reference is not None:
        lines.append(f"reference  {describe(report.reference)}")
    return "\n".join([*lines, f"text       {how}", "", markdown_table(("", "value"), rows)])


def describe(side: Side) -> str:
    """``model.gguf, activations auto, KV cache bf16, kernels vnni``."""
    if side.isa is None:
        return side.source
    return f"{side.source}, activations {side.activations}, KV cache {side.kv_dtype}, kernels {side.isa}"


def _percent(share: Estimate) -> Estimate:
    return Estimate(100 * share.value, 100 * share.error)
