"""Names of adapter arrays: which pairs form a layer.

Canonical names are "<module>.lora_A.weight" [r, in] and "<module>.lora_B.weight" [out, r] (for an adapted
embedding "<module>.lora_embedding_A" and "_B"). Everything else in an adapter (modules saved in full, DoRA
magnitudes) is not a factor and is left to the plain mean.
"""

from __future__ import annotations

from collections.abc import Iterable

from umbel.errors import ConfigError

_SUFFIXES = ((".lora_A.weight", ".lora_B.weight"), (".lora_embedding_A", ".lora_embedding_B"))


def pair_layers(names: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Return module -> (name of A, name of B), sorted by module; other names are ignored.

    Raises ConfigError naming the first three factors that lack their partner.
    """
    known = set(names)
    pairs: dict[str, tuple[str, str]] = {}
    lonely: list[str] = []
    for name in sorted(known):
        for suffix, other in (*_SUFFIXES, *((b, a) for a, b in _SUFFIXES)):
            if not name.endswith(suffix):
                continue
            module = name.removesuffix(suffix)
            if module + other not in known:
                lonely.append(name)
            elif suffix.removesuffix(".weight").endswith("_A"):
                pairs[module] = (name, module + other)
    if lonely:
        raise ConfigError(
            "adapter",
            "has factors without their partner",
            got=lonely[:3],
            allowed="lora_A and lora_B of every adapted module",
            remedy="Send both factors, or use a rule that shares one of them.",
        )
    return dict(sorted(pairs.items()))
