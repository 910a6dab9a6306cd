"""Fits the constants of `simulate/runahead_paper.toml` to the paper's figures for Llama 7B.

    python -m benchmarks.runahead_fit

Each constant in turn is made larger or smaller by a factor as long as that lowers the sum of
squares of the errors' logarithms; then the factor is brought nearer to 1. It takes a few minutes.
The last line is a JSON object: constants, and the errors that they and those of the file leave.
"""

from __future__ import annotations

import argparse
import json

from pydantic import ValidationError

from batchllm_operator.simulate.runahead import (
    Calibration,
    log_errors,
    predict_rows,
    read_paper,
    root_mean_square,
)

_LEAST_FACTOR = 1.003
_START = Calibration(
    achievable_compute=0.6,
    score_bytes=30.0,
    layer_overhead_s=3e-3,
    gather_overhead_s=1e-4,
    link_share=0.8,
    gather_share=0.5,
)


def error_of(calibration: Calibration) -> float:
    """Root mean square of the logarithms of predicted over printed figures, of the fitted rows."""
    return root_mean_square(log_errors(predict_rows(calibration, only_fitted=True)))


def fit(calibration: Calibration) -> tuple[Calibration, float]:
    """The constants that coordinate descent leads to, and their error."""
    best, factor = error_of(calibration), 1.2
    while factor > _LEAST_FACTOR:
        has_improved = False
        for name in Calibration.model_fields:
            for change in (factor, 1 / factor):
                values = calibration.model_dump()
                values[name] *= change
                try:
                    tried = Calibration(**values)
                except ValidationError:  # a share above 1
                    continue
                error = error_of(tried)
                if error < best:
                    best, calibration, has_improved = error, tried, True
        if not has_improved:
            factor = factor**0.5
    return calibration, best


def main() -> None:
    """Fit, and print what came out."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.parse_args()
    stored = read_paper().calibration
    fitted, error = fit(_START)
    for name, value in fitted.model_dump().items():
        print(f"{name:20} {value:.4g}  (in the file {getattr(stored, name):.4g})")
    print(
        json.dumps(
            {
                "benchmark": "runahead_fit",
                "fitted": {name: float(f"{v:.4g}") for name, v in fitted.model_dump().items()},
                "rms_log_error": round(error, 5),
                "stored_rms_log_error": round(error_of(stored), 5),
                "num_figures": len(log_errors(predict_rows(stored, only_fitted=True))),
            }
        )
    )


if __name__ == "__main__":
    main()
