"""Resolves every published command of recipes.json without a layout and with each, as on its GPU.

`python tests/recipes/resolve_recipes.py [--write]` prints one JSON line per command: by layout ("stock"
without one, and `SPREAD`) why it is refused as published, and without the arguments that name backends or a
dtype; null if it is accepted. `--write` puts the table of the results into docs/compatibility.md.
"""

import importlib
import json
import os
import sys
import tempfile
from pathlib import Path

from sgl_kvpool.commands.plan import child

HERE = Path(__file__).resolve().parent
CONFIGS = HERE.parent / "commands" / "plan" / "configs"
#: Arguments with which the published commands name what a layout decides.
NAMED = {f"--{kind}attention-backend" for kind in ("", "prefill-", "decode-", "speculative-draft-")}
NAMED |= {"--dsa-prefill-backend", "--dsa-decode-backend", "--kv-cache-dtype"}
#: Models of models.json and of the tests of `plan` -> the families of the table.
FAMILIES = {
    "DeepSeek-V3, R1": ("deepseek_v3",),
    "DeepSeek-V3.2": ("deepseek_v32",),
    "Kimi-K2, K2.5, K2.6": ("kimi_k2", "kimi_k2t", "kimi_k25"),
    "Kimi-K3": ("kimi_k3",),
    "GLM-5.1, 5.2": ("glm5", "glm52"),
    "GLM-5.3-Flash": ("glm53flash",),
    "GLM-4.7-Flash": ("glm47flash",),
    "Ling-2.6, Ring-2.5": ("ling_1t", "ling_flash"),
    "LongCat": ("longcat_flash", "longcat2"),
    "Mistral-Large-3, Small-4": ("mistral_large3", "mistral_small4"),
    "MiniCPM3": ("minicpm3",),
}
#: A layout, and the argument that all of a machine's ranks share a prefix pool.
SPREAD = "fp4 --dcp-size 8"
PAGE = HERE.parents[1] / "docs" / "compatibility.md"


def published() -> list[dict]:
    """The commands: id, model, memory of a GPU in GiB, source, date of the look, arguments."""
    return json.loads((HERE / "recipes.json").read_text())


def table(answers: list[dict]) -> str:
    """Commands that start, per family and layout: as published and, if more, without the named arguments."""
    from sgl_kvpool.commands.tables import markdown

    model_of = {recipe["id"]: recipe["model"] for recipe in published()}
    columns = list(answers[0]["refused"])
    lines = []
    for family, models in [*FAMILIES.items(), ("all", tuple(set(model_of.values())))]:
        found = [answer["refused"] for answer in answers if model_of[answer["id"]] in models]
        cells = []
        for column in columns:
            first, second = (sum(one[column][which] is None for one in found) for which in (0, 1))
            cells.append(str(first) if first == second else f"{first}, {second}")
        lines.append([family, str(len(found)), *cells])
    titles = ["no layout" if name == "stock" else f"`{name}`" for name in columns]
    return markdown(["model", "commands", *titles], *lines)


def without_named(words: list[str]) -> list[str]:
    """A command without the arguments of `NAMED`, each of which has one value."""
    return [word for before, word in zip(["", *words], words, strict=False) if not {before, word} & NAMED]


def write_models() -> None:
    """Folders with a config.json each, below the current one: `name`, and `DRAFT/name` for drafts."""
    texts = {file.stem: file.read_text() for file in CONFIGS.glob("*.json")}
    models = json.loads((HERE / "models.json").read_text())
    texts |= {name: json.dumps(config) for name, config in models.items()}
    for name, text in texts.items():
        for folder in (Path(name), Path("DRAFT", name)):
            folder.mkdir(parents=True)
            (folder / "config.json").write_text(text)


def refusal(model: str, words: list[str]) -> str | None:
    """Why a server does not start with these arguments, as one line; None if they are resolved."""
    from sglang.srt.server_args import prepare_server_args

    try:
        server_args = prepare_server_args(["--model-path", model, "--device", "cuda", *words])
        server_args.resolve_once()
        server_args.check_server_args()
    except (ValueError, RuntimeError, NotImplementedError, AssertionError, ImportError, SystemExit) as error:
        return " ".join(str(error).split()) or repr(error)
    return None


def main() -> None:
    """Resolve all commands, in order."""
    results = []
    answers = os.dup(1)
    os.dup2(2, 1)  # SGLang prints
    for module in child._MODULES:
        importlib.import_module(module)
    from sglang.srt.plugins import load_plugins

    from sgl_kvpool.commands.doctor.probes import hook_groups
    from sgl_kvpool.commands.plan.sizing import Machine
    from sgl_kvpool.layout import MLAKVCacheLayout

    load_plugins()
    for group in hook_groups():
        group.problem()
    with tempfile.TemporaryDirectory() as folder, os.fdopen(answers, "w") as pipe:
        os.chdir(folder)
        write_models()
        for recipe in published():
            child._describe(Machine(recipe["gpu_gib"], 16, 3.0, 0.0))
            found = {}
            for layout in (None, *MLAKVCacheLayout, SPREAD):
                added = [] if layout is None else ["--kv-cache-layout", *layout.split()]
                words = recipe["arguments"]
                forms = tuple(words), tuple(without_named(words))  # equal for most commands
                said = {form: refusal(recipe["model"], [*form, *added]) for form in dict.fromkeys(forms)}
                found[layout or "stock"] = [said[form] for form in forms]
            results.append({"id": recipe["id"], "refused": found})
            print(json.dumps(results[-1]), file=pipe, flush=True)
    if "--write" in sys.argv:
        from scripts.kit.outputs import updated

        PAGE.write_text(updated(PAGE.read_text(), {"published": lambda: table(results)}))


if __name__ == "__main__":
    sys.exit(main())
