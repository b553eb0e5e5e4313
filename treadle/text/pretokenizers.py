"""How byte-level BPE vocabularies cut text before merging, by the name that GGUF files give in
``tokenizer.ggml.pre``.

Every entry restates the ``pre_tokenizer`` and ``normalizer`` of the ``tokenizer.json`` that the models were
published with, so that ids equal those of Hugging Face.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Regex, normalizers, pre_tokenizers
from tokenizers.normalizers import Normalizer
from tokenizers.pre_tokenizers import PreTokenizer

from treadle.core import TreadleError

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN2 = rf"{_WORDS}|\p{{N}}|{_REST}"
_LLAMA3 = rf"{_WORDS}|\p{{N}}{{1,3}}|{_REST}"
_CJK = "[一-龥ࠀ-一가-퟿]+"
_DEEPSEEK_LETTERS = (  # cased letters
    r"\s?["
    "A-Za-z\u00b5À-ÖØ-öø-ƺƼ-ƿ\u01c4-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-\u03f5Ϸ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕ"
    "Ἐ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-\u1f7dᾀ-ᾴᾶ-ᾼ\u1fbeῂ-ῄῆ-ῌῐ-\u1fd3ῖ-\u1fdbῠ-Ῥῲ-ῴῶ-ῼ\u2102\u2107\u210a-\u2113"
    "\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149ⅎ"
    "ↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿ\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a"
    "\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2"
    "\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
    "]+"
)
_DEEPSEEK3_CJK = "[一-龥぀-ゟ゠-ヿ]+"
_DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class Scheme:
    """One way to cut text. ``patterns`` are applied one after the other, each isolating its matches."""

    patterns: tuple[str, ...] = ()
    digits: bool = False  # every digit alone
    gpt2_words: bool = False  # cut with GPT-2's own expression after the patterns
    nfc: bool = False
    whole_words_first: bool = False  # a word that is in the vocabulary is taken without merging
    adds_bos: bool = False  # when the metadata does not say

    def pre_tokenizer(self) -> PreTokenizer:
        """The steps as the ``tokenizers`` library runs them."""
        steps: list[PreTokenizer] = [pre_tokenizers.Split(Regex(p), "isolated") for p in self.patterns]
        if self.digits:
            steps.append(pre_tokenizers.Digits(individual_digits=True))
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=self.gpt2_words))
        return pre_tokenizers.Sequence(steps)

    def normalizer(self) -> Normalizer | None:
        """What happens to text before it is cut."""
        return normalizers.NFC() if self.nfc else None


_GPT2 = Scheme(gpt2_words=True)
_QWEN = Scheme((_QWEN2,), nfc=True)
_LLAMA = Scheme((_LLAMA3,), whole_words_first=True, adds_bos=True)
SCHEMES: dict[str, Scheme] = {
    "gpt-2": _GPT2,
    "smollm": Scheme(digits=True, gpt2_words=True),
    "llama-bpe": _LLAMA,
    "llama3": _LLAMA,
    "llama-v3": _LLAMA,
    "qwen2": _QWEN,
    "deepseek-r1-qwen": _QWEN,
    "deepseek-llm": Scheme(
        (r"[\r\n]", _DEEPSEEK_LETTERS, r"\s?[!-/:-~！-／：-～‘-‟　-。]+", r"\s+$", _CJK), digits=True
    ),
    "deepseek-coder": Scheme((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK), digits=True),
    "deepseek-v3": Scheme((r"\p{N}{1,3}", _DEEPSEEK3_CJK, _DEEPSEEK3)),
}


def scheme(name: str) -> Scheme:
    """The scheme of ``tokenizer.ggml.pre``. Raises TreadleError for a name that is not known."""
    found = SCHEMES.get(name)
    if found is None:
        known = ", ".join(sorted(SCHEMES))
        raise TreadleError(f"tokenizer.ggml.pre: {name!r} is not supported; supported are {known}")
    return found
