"""Remarks on a model that is nearly all embeddings; quiet on balanced, small and frozen ones."""

import pytest

from holter.diagnosis import top_cause
from holter.faults.model.architecture import Architecture
from holter.records import Census, Component, Finding, TensorEntry
from made_up import made_window


def tensor(
    name: str, *shape: int, module_class: str = "Linear", component: int = 0, is_buffer: bool = False
) -> TensorEntry:
    return TensorEntry(
        name, shape, "float32", not is_buffer, is_buffer, 0, component=component, module_class=module_class
    )


def judge(*entries: TensorEntry, is_trained: bool = True) -> list[Finding]:
    census = Census(
        model=0,
        wrapper="",
        is_replicated=False,
        optimizers=["AdamW"],
        components=[Component("", "GPT", "", is_trained)],
        backward_order=[],
        part=0,
        parts=1,
        entries=list(entries),
    )
    window = made_window(census=dict.fromkeys((0, 1), census))
    return list(Architecture().judge(window))


TABLE = tensor("embed.weight", 50_000, 64, module_class="Embedding")


def test_a_model_of_embeddings_gets_a_remark() -> None:
    (finding,) = judge(TABLE, *(tensor(f"blocks.{i}.fc.weight", 64, 256) for i in range(4)))
    assert (finding.severity, finding.tensors, finding.modules) == ("info", ("embed.weight",), ("embed",))
    assert top_cause(finding) == "lopsided_architecture"
    assert finding.summary == "Embeddings hold 98% of the model's 3,265,536 parameters."


def test_one_layer_that_holds_nearly_all_gets_a_remark() -> None:
    (finding,) = judge(tensor("head.weight", 4096, 4096), tensor("fc.weight", 64, 64))
    assert finding.tensors == ("head.weight",)
    assert finding.facts["is_most_in_embeddings"] is False


def test_a_balanced_model_gets_none() -> None:
    assert judge(TABLE, *(tensor(f"blocks.{i}.fc.weight", 1024, 1024) for i in range(4))) == []


def test_a_small_model_gets_none() -> None:
    assert judge(tensor("embed.weight", 1000, 16, module_class="Embedding"), tensor("fc.weight", 16, 16)) == []


def test_a_frozen_model_gets_none() -> None:
    assert judge(TABLE, is_trained=False) == []


def test_buffers_do_not_count() -> None:
    assert judge(tensor("mask", 4096, 4096, is_buffer=True), tensor("fc.weight", 64, 64)) == []


def test_a_wrong_threshold_is_named() -> None:
    with pytest.raises(ValueError, match=r"architecture\.share must be between 0 and 1, got 1"):
        Architecture(share=1)
