"""Faults in low-rank adapters."""

from __future__ import annotations

import importlib.util

from tests.mutants.fault import Fault

_LORA, _ON = "vla_rl/policies/vla/lora.py", "tests/policies/vla/test_lora.py::"
_CHANGE = f"{_ON}test_at_first_they_change_nothing_and_then_what_b_times_a_says"
_TRAINED = f"{_ON}test_adapters_and_what_is_beside_the_layers_of_the_expert_are_trained"

_FAULTS = (
    Fault("adapters weigh 1 whatever alpha is", _LORA, "lora_alpha=self.alpha", "lora_alpha=self.rank", (_CHANGE,)),
    Fault(
        "adapters have dropout",
        _LORA,
        "lora_dropout=0.0",
        "lora_dropout=0.5, init_lora_weights=False",
        (_CHANGE,),
    ),
    Fault(
        "adapters reach the vision-language model unasked",
        _LORA,
        'and (self.within == "all" or f"{name}.weight" in expert)',
        "and bool(expert)",
        (_TRAINED,),
    ),
    Fault(
        "adapters never reach the vision-language model",
        _LORA,
        'and (self.within == "all" or f"{name}.weight" in expert)',
        'and f"{name}.weight" in expert',
        (_TRAINED, _CHANGE),
    ),
    Fault(
        "what the expert has beside its layers stays as it is",
        _LORA,
        "if _ADAPTER in name or (name in expert and not any(part in name for part in (_LAYERS, *_VOCABULARY)))",
        "if _ADAPTER in name",
        (_TRAINED,),
    ),
    Fault(
        "the adapted weights are trained too",
        _LORA,
        "if _ADAPTER in name or (name in expert and not any(part in name for part in (_LAYERS, *_VOCABULARY)))",
        "if _ADAPTER in name or name in expert",
        (_TRAINED,),
    ),
    Fault(
        "a prefix is kept although adapters change it",
        _LORA,
        'return self.within == "all"',
        "return False",
        (f"{_ON}test_a_kept_prefix_does_not_go_with_adapters_in_front_of_it",),
    ),
)

# Without peft the tests of adapters are skipped.
FAULTS: tuple[Fault, ...] = _FAULTS if importlib.util.find_spec("peft") is not None else ()
