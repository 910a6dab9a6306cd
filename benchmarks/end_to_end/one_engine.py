"""The process of one engine, whose argument is a `Task` as JSON.

    python -m benchmarks.end_to_end.one_engine '{"policy": "stock_sorted", ...}'

Imports nothing unless it is run: vLLM's worker processes import it too, and on a CPU vLLM 0.32
doesn't start in one that has numba.
"""

if __name__ == "__main__":
    import sys

    from benchmarks.end_to_end.engine_run import run
    from benchmarks.end_to_end.task import Task

    run(Task.from_json(sys.argv[1]))
