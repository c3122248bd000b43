"""Write goldens.json from a demo.json: ``python tests/engine/write_goldens.py demo-results/demo.json``."""

import json
import sys
from pathlib import Path


def main(source):
    demo = json.loads(Path(source).read_text())
    goldens = {
        "prompts": demo["prompts"],
        "greedy": {result["layout"]: result["greedy"] for result in demo["results"]},
    }
    (Path(__file__).resolve().parent / "goldens.json").write_text(json.dumps(goldens) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
