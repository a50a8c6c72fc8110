"""`python -m benchmarks.step_tables PROFILES [--output FILE]`: writes the step tables that simulations read.

PROFILES holds `fitted/decode_step_ms.csv`, `fitted/prefill_ms.csv`, `fitted/fit_coefficients.csv`, `fitted/models.json`
and `kernels/`, composed of ai-dynamo/aiconfigurator's measured tables (Apache-2.0).
"""

import argparse
import sys
from pathlib import Path

from benchmarks.step_tables.fit import KNOTS, Row, make_rows

OUTPUT = Path(__file__).parents[2] / "simulator" / "hardware" / "coefficients.csv"
HEADER = """\
# Milliseconds of one vLLM step on one GPU, or on tp GPUs together; made by `python -m benchmarks.step_tables`.
#   step = linear(new tokens) + launch + sequence * sequences + context * context of decodes
#          + the sum over prefill chunks of max(pair * (c^2 + 2 p c), context * (c + p))      c new tokens after p
# linear_N: all but attention for N new tokens (weights are read once), as measured; between two N a straight line.
# error: mean relative error of the row on the decode steps and prefills that it was made of.
# Composed of measured kernel tables of ai-dynamo/aiconfigurator (Apache-2.0): GEMM, attention, all-reduce.
# Sources: aic = its system's tables (h100: vLLM 0.24, a100: vLLM 0.14); aic-fp8 = the same with its fp8 GEMM table.
# Neither the host's part of a step nor prefixes were measured there: prefixes follow from the count of pairs.
"""


def main() -> int:
    """Writes the file and says how far its rows are off."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.step_tables", description=__doc__)
    parser.add_argument("profiles", type=Path)
    parser.add_argument("--output", type=Path, default=OUTPUT)
    options = parser.parse_args()
    rows = make_rows(options.profiles)
    names = ["gpu", "model", "tp", "source", "error", "launch", "sequence", "context", "pair"]
    lines = [",".join([*names, *(f"linear_{knot}" for knot in KNOTS)])]
    lines += [_line(row) for row in rows]
    options.output.write_text(HEADER + "\n".join(lines) + "\n", encoding="utf-8")
    worst = max(rows, key=lambda row: row.error)
    mean = sum(row.error for row in rows) / len(rows)
    sys.stdout.write(
        f"{len(rows)} rows, mean error {mean:.1%}, worst {worst.gpu} {worst.model} tp{worst.tp} {worst.error:.1%}\n"
    )
    return 0


def _line(row: Row) -> str:
    figures = [row.launch, row.sequence, row.context, row.pair, *row.linear]
    return ",".join(
        [row.gpu, row.model, str(row.tp), row.source, f"{row.error:.3f}", *(f"{value:.4g}" for value in figures)]
    )


if __name__ == "__main__":
    sys.exit(main())
