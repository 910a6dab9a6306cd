"""Whether ours says what stock vLLM says: greedy tokens of the same prompts, compared.

Weights are random, from a normal distribution as models begin their training with (vLLM's dummy
weights are so small that all tokens tie). Margins are small even so, and another order of
additions then decides. So the figures are the share of outputs and of tokens that agree, and, where
two outputs part, by how much stock vLLM itself preferred its own token to the other one's (the
margin, in log-probability). Stock vLLM with other engine settings, whose batches differ as much,
is the control: what ours may differ by without being wrong. The exit code is 1 if one of ours
parts from stock where that is no near-tie: by more than twice the control's largest margin, or the
typical margin between two tokens if that is larger.

    python -m benchmarks.end_to_end.agreement --out DIR                # on a GPU
    python -m benchmarks.end_to_end.agreement --out DIR --model tiny   # a rehearsal on a CPU
"""

import argparse
import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from batchllm_operator.engine import EngineJob, EngineRequest
from batchllm_operator.vllm_plugin.scheduler.hints import RequestHints
from benchmarks.drawn_weights import LOAD_FORMAT, register_loader
from benchmarks.end_to_end.models import MODELS, max_model_len
from benchmarks.end_to_end.policies import POLICIES
from benchmarks.end_to_end.processes import end_on_sigterm, run_logged
from benchmarks.end_to_end.task import Task
from benchmarks.provenance import code_digest, provenance_of_another_process

REFERENCE: Final = ("stock_sorted", "default")
CONTROL: Final = ("stock_sorted", "chunk_4096_seqs_512")
COMPARED: Final = (
    ("batchllm", "default"),
    CONTROL,
    ("batchllm_graphs", "default"),
    ("batchllm_stock_attention", "default"),
)
"""The most telling first: a lease may end before the last."""
_WORKLOAD: Final = "case_1"
_SHARE: Final = 0.05
"""Of the workload's requests."""
_ENGINE_TIMEOUT_S: Final = 150.0
_NUM_LOGPROBS: Final = 8


class Outputs(NamedTuple):
    """Greedy outputs of n prompts: arrays [n, output tokens], and [.., k] of the likeliest."""

    tokens: NDArray[np.int64]
    likely_tokens: NDArray[np.int64]
    """The k likeliest, the likeliest first."""
    logprobs: NDArray[np.float64]
    """Of those."""


def compare(reference: Outputs, other: Outputs) -> dict[str, Any]:
    """How far two runs agree.

    Returns:
        Shares of equal outputs and of tokens before each output's first difference; margins at
        first differences: what the reference gave its own token beyond the other's, in
        log-probability. A token that isn't among the reference's k likeliest counts with the
        margin of the k-th, as `num_beyond` says how often.

    Raises:
        ValueError: the runs aren't of the same prompts and lengths.
    """
    if reference.tokens.shape != other.tokens.shape:
        raise ValueError(f"outputs of {reference.tokens.shape} and of {other.tokens.shape} tokens")
    differs = reference.tokens != other.tokens
    parts = np.flatnonzero(differs.any(axis=1))
    firsts = differs[parts].argmax(axis=1)
    likely, logprobs = reference.likely_tokens[parts, firsts], reference.logprobs[parts, firsts]
    is_theirs = likely == other.tokens[parts, firsts][:, None]
    theirs = np.where(is_theirs.any(axis=1), is_theirs.argmax(axis=1), likely.shape[1] - 1)
    is_ours = likely == reference.tokens[parts, firsts][:, None]
    rows = np.arange(len(parts))
    margins = logprobs[rows, is_ours.argmax(axis=1)] - logprobs[rows, theirs]
    num_outputs, num_tokens = reference.tokens.shape
    num_agreed = (num_outputs - len(parts)) * num_tokens + int(firsts.sum())
    return {
        "num_outputs": num_outputs,
        "num_tokens": num_tokens,
        "equal_outputs": round(1 - len(parts) / num_outputs, 4),
        "equal_first_tokens": round(1 - float(differs[:, 0].mean()), 4),
        "tokens_before_difference": round(num_agreed / reference.tokens.size, 4),
        "median_margin": round(float(np.median(margins)), 5) if len(parts) else None,
        "largest_margin": round(float(margins.max()), 5) if len(parts) else None,
        "num_beyond": int(np.sum(~is_theirs.any(axis=1))),
    }


def typical_margin(outputs: Outputs) -> float:
    """Median over all tokens of what the likeliest has beyond the second, in log-probability."""
    return round(float(np.median(outputs.logprobs[..., 0] - outputs.logprobs[..., 1])), 5)


def is_plausible(compared: Mapping[str, Any], control: Mapping[str, Any], typical: float) -> bool:
    """Whether all first differences may be near-ties.

    Args:
        compared: what `compare` says of ours.
        control: the same of stock vLLM with other settings.
        typical: `typical_margin` of the reference.
    """
    most = max(2 * (control["largest_margin"] or 0.0), typical)
    has_only_likely = compared["num_beyond"] <= control["num_beyond"]
    return has_only_likely and (compared["largest_margin"] or 0.0) <= most


def generate(task: Task) -> Outputs:
    """Greedy outputs with log-probabilities, by the place of a prompt in the table."""
    from batchllm_operator.engine.vllm.engine import VLLMEngine  # says how vLLM is imported

    register_loader()
    job = EngineJob(max_model_len(task.model), num_requests=task.shape(_WORKLOAD).num_requests)
    engine = VLLMEngine(task.spec(), job)
    try:
        llm = engine.llm_engine
        size = int(llm.vllm_config.cache_config.block_size)
        planned = task.requests(_WORKLOAD, size)
        for request in planned.requests:
            _add(llm, request, planned.output_tokens)
        by_idx: dict[int, Any] = {}
        while llm.has_unfinished_requests():
            by_idx |= {
                int(each.request_id): each.outputs[0] for each in llm.step() if each.finished
            }
    finally:
        engine.close()
    outputs = [by_idx[idx] for idx in range(len(by_idx))]
    # A sampled token that isn't among the likeliest comes on top of them.
    likely = [
        [
            sorted(((other.logprob, token) for token, other in place.items()), reverse=True)
            for place in output.logprobs
        ]
        for output in outputs
    ]
    ranked = np.array([[place[:_NUM_LOGPROBS] for place in places] for places in likely])
    tokens = np.array([list(output.token_ids) for output in outputs], dtype=np.int64)
    return Outputs(tokens, ranked[..., 1].astype(np.int64), ranked[..., 0])


def _add(llm: Any, request: EngineRequest, output_tokens: int) -> None:
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt
    from vllm.sampling_params import RequestOutputKind

    hints = RequestHints(
        request.group_id, request.num_prefix_tokens, request.group_size, request.num_output_tokens
    )
    params = SamplingParams(
        max_tokens=output_tokens,
        temperature=0.0,
        ignore_eos=True,
        detokenize=False,
        logprobs=_NUM_LOGPROBS,
        output_kind=RequestOutputKind.FINAL_ONLY,
        extra_args=hints.to_extra_args(),
    )
    prompt = TokensPrompt(prompt_token_ids=request.prompt_token_ids)
    llm.add_request(str(request.request_idx), prompt, params)


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n\n")[0], prog="python -m benchmarks.end_to_end.agreement"
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--model", default="Mistral-7B", choices=MODELS)
    parser.add_argument("--json", type=Path, help="also write the last line here")
    parser.add_argument("--one", nargs=2, metavar=("POLICY", "SETTINGS"), help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def outputs_file(args: argparse.Namespace, policy: str, settings: str) -> Path:
    """Where outputs lie; of other code or arguments, they lie elsewhere."""
    what = [code_digest(), args.model]
    digest = hashlib.sha256(json.dumps(what).encode()).hexdigest()[:8]
    return Path(args.out / f"agreement-{policy}-{settings}-{digest}.npz")


def run_engine(args: argparse.Namespace, policy: str, settings: str) -> str | None:
    """Generate in a process of its own, unless that has been done; why it failed, if it did."""
    if outputs_file(args, policy, settings).exists():
        return None
    log = args.out / f"agreement-{policy}-{settings}.log"
    command = [sys.executable, "-P", "-m", "benchmarks.end_to_end.agreement", *sys.argv[1:]]
    environment = POLICIES[policy].environment
    return run_logged([*command, "--one", policy, settings], log, environment, _ENGINE_TIMEOUT_S)


def report_of(
    args: argparse.Namespace, outputs: Mapping[str, Outputs], missing: Mapping[str, str]
) -> dict[str, Any]:
    """All that is known so far."""
    reference = outputs[" ".join(REFERENCE)]
    compared = {
        name: compare(reference, other)
        for name, other in outputs.items()
        if name != " ".join(REFERENCE)
    }
    typical, control = typical_margin(reference), compared.get(" ".join(CONTROL))
    return {
        "benchmark": "agreement",
        "model": args.model,
        "workload": _WORKLOAD,
        "reference": " ".join(REFERENCE),
        "control": " ".join(CONTROL),
        "typical_margin": typical,
        "compared": compared,
        "is_plausible": {
            name: None if control is None else is_plausible(figures, control, typical)
            for name, figures in compared.items()
            if name != " ".join(CONTROL)
        },
        "missing": dict(missing),
        "share": _SHARE,
    }


def main() -> int:
    """0 if all agree as far as can be asked, else 1."""
    args = parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.one:
        policy, settings = args.one
        engine = {"extra_args": {"load_format": LOAD_FORMAT}}
        task = Task(policy, settings, model=args.model, share=_SHARE, engine=engine)
        path = outputs_file(args, policy, settings)
        np.savez_compressed(path, **generate(task)._asdict())
        return 0
    end_on_sigterm()
    here = provenance_of_another_process()
    missing: dict[str, str] = {}
    outputs: dict[str, Outputs] = {}
    report: dict[str, Any] = {}
    for policy, settings in (REFERENCE, *COMPARED):
        name = f"{policy} {settings}"
        if reason := run_engine(args, policy, settings):
            missing[name] = reason
        else:
            outputs[name] = Outputs(**np.load(outputs_file(args, policy, settings)))
        print(f"== {name}: {missing.get(name, 'done')}", flush=True)
        if " ".join(REFERENCE) not in outputs:
            sys.exit(f"stock vLLM failed: {missing}")
        report = report_of(args, outputs, missing) | here
        if figures := report["compared"].get(name):
            print(" ".join(f"{each}={value}" for each, value in figures.items()), flush=True)
        if args.json:
            args.json.write_text(json.dumps(report), encoding="utf-8")
    print(json.dumps(report))
    return 1 if missing or not all(report["is_plausible"].values()) else 0


if __name__ == "__main__":
    sys.exit(main())
