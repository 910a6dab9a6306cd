"""Rows that a real engine can't serve cost only themselves."""

from support.demo_job import Demo


def test_poisoned_too_long_empty_and_foreign_prompts_fail_alone(demo: Demo) -> None:
    spec = demo.write_spec("poison", sampling={"max_tokens": 4})
    result = demo.run_script("poisoned", spec)
    outputs = result["outputs"]
    assert [idx for idx, (has_text, _) in outputs.items() if has_text] == ["0", "2"]
    assert sorted(outputs) == list("012345")
    assert "poisoned batch" in outputs["1"][1]
    for idx in "345":  # refused by vLLM before anything ran
        assert outputs[idx][1].startswith("engine_error: ")
    assert result["started"] >= 2
