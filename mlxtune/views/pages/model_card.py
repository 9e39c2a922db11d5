"""The text of a model card: what a run's folder says of its adapter, without data and paths.

Names stand for paths. Rows are quoted only where anybody can read them on the hub.
"""

import dataclasses
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import PurePath

from mlxtune.config import OPTIONS, TrainConfig
from mlxtune.config.fields import Affects, flag
from mlxtune.core.run.evaluation import Sample, verdict_line
from mlxtune.core.run.run import Run, mapping, text
from mlxtune.core.run.summary import RunView, data_name, data_names, hub_data
from mlxtune.core.text import sentence
from mlxtune.errors import one_line

_SAMPLES = 3


def quoted_samples(run: Run) -> list[Sample]:
    """Return the answers to validation rows that may be shown: if all data is public."""
    public = {
        title
        for each in hub_data(run)
        if each.get("public") is True
        for title in mapping(each, "titles").values()
    }
    names = set(data_names(run))
    generated = run.evaluation.generated if run.evaluation else None
    if generated is None or not names or not names <= public:
        return []
    return generated.samples[:_SAMPLES]


def card_lines(run: Run, view: RunView, *, repository: str, base: str, peft: bool) -> Iterator[str]:
    """Yield the lines of a card in Markdown; `base` is the base model's name."""
    name = repository.partition("/")[2]
    yield f"# {name}"
    yield ""
    yield f"A LoRA adapter for {_code(base)}, trained with mlxtune."
    yield ""
    yield from _result(run, view)
    yield from _use(repository, base, peft=peft)
    yield from _data(run)
    yield from _training(run, view, base)
    for number, sample in enumerate(quoted_samples(run), start=1):
        yield from _sample(number, sample)


def _result(run: Run, view: RunView) -> Iterator[str]:
    yield "## Result"
    yield ""
    evaluation = run.evaluation
    if evaluation is None or evaluation.adapted is None or evaluation.difference is None:
        yield "Not evaluated: no rows were held out." if view.finished else "Not finished."
        yield ""
        return
    yield "| on rows held out of training | loss | perplexity |"
    yield "| --- | --- | --- |"
    for name, each in ("base model", evaluation.base), ("with the adapter", evaluation.adapted):
        yield f"| {name} | {each.loss:.4f} | {each.perplexity:.4g} |"
    yield ""
    yield f"{sentence(verdict_line(evaluation))} Losses are in nats per supervised token."
    yield ""


def _use(repository: str, base: str, *, peft: bool) -> Iterator[str]:
    yield "## Use"
    yield ""
    if peft:
        yield "With transformers and PEFT:"
        yield ""
        yield "```python"
        yield "from peft import PeftModel"
        yield "from transformers import AutoModelForCausalLM"
        yield ""
        yield f"base = AutoModelForCausalLM.from_pretrained({json.dumps(one_line(base))})"
        yield f'model = PeftModel.from_pretrained(base, "{repository}")'
        yield "```"
        yield ""
    yield "With mlx-lm:"
    yield ""
    yield "```sh"
    yield f"hf download {repository} --include 'mlx-lm/*' --local-dir adapter"
    yield (
        f"mlx_lm.generate --model {shlex.quote(one_line(base))} --adapter-path adapter/mlx-lm "
        "--prompt 'Hello'"
    )
    yield "```"
    yield ""
    yield "Write prompts as in training, with the model's chat template."
    yield ""


def _data(run: Run) -> Iterator[str]:
    yield "## Data"
    yield ""
    yield "| data | rows read | trained on | held out | skipped | tokens | supervised |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    for ledger in run.ledgers:
        numbers = (
            *(ledger.rows_read, ledger.rows_train, ledger.rows_validation),
            *(ledger.rows_skipped.total(), ledger.tokens, ledger.tokens_supervised),
        )
        yield f"| {_code(data_name(run, ledger.path))} | {' | '.join(f'{n:,}' for n in numbers)} |"
    yield ""
    for each in hub_data(run):
        license = text(each, "license")
        licensed = f"licence {_code(license)}" if license else "no licence stated"
        commit = _code(text(each, "commit"))
        yield f"- {_code(text(each, 'repository'))}: {licensed}, commit {commit}"
    hashes = {text(run.about, name): name for name in ("validation_hash", "data_hash")}
    for hash_, name in hashes.items():
        if hash_:
            yield f"- {name.replace('_', ' ')}: {_code(hash_)}"
    yield ""


def _training(run: Run, view: RunView, base: str) -> Iterator[str]:
    yield "## Training"
    yield ""
    yield "```sh"
    yield command_of(run, base)
    yield "```"
    yield ""
    yield f"- {view.course}, {view.status}"
    for name, value in (
        ("LoRA", text(run.about, "lora", "description")),
        ("model", text(run.about, "model", "description")),
        ("template", text(run.about, "template")),
        ("computed on", text(run.about, "device")),
        ("SHA-256 of mlx-lm/adapters.safetensors", view.sha256),
    ):
        if value:
            yield f"- {name}: {_line(value)}"
    versions = mapping(run.about, "versions").items()
    if listed := ", ".join(f"{_line(str(name))} {_line(str(each))}" for name, each in versions):
        yield f"- versions: {listed}"
    yield ""


def command_of(run: Run, base: str) -> str:
    """Return the command that trains the same, with names in the place of paths."""
    defaults = {each.name: each.default for each in dataclasses.fields(TrainConfig)}
    on_hub = {text(each, "name") for each in hub_data(run)}
    words = ["mlxtune", "train", "--model-path", base]
    for name, value in run.config.items():
        option = OPTIONS.get(name)
        own = tuple(value) if isinstance(value, list) else value
        if option is None or name == "model_path" or own == defaults.get(name) or own is None:
            continue
        texts = [str(each) for each in (own if isinstance(own, tuple) else [own])]
        if option.affects is Affects.INPUT:
            texts = [each if each in on_hub else PurePath(each).name for each in texts]
        elif option.affects not in (Affects.RESULT, Affects.LENGTH):
            continue
        if own is True:
            words.append(flag(name))
        elif option.several or option.affects is Affects.INPUT:
            words += [word for each in texts for word in (flag(name), each)]
        else:
            words += [flag(name), ",".join(texts)]
    return " ".join(shlex.join(words).split())


def _sample(number: int, sample: Sample) -> Iterator[str]:
    if number == 1:
        yield "## Samples"
        yield ""
    parts = {
        "Prompt": sample.prompt,
        "Expected": sample.expected,
        "Base model": sample.base,
        "With the adapter": sample.adapted or "",
    }
    for name, content in parts.items():
        # Longer than any fence in the text.
        fence = "`" * max(3, *(1 + len(each) for each in re.findall("`+", content)), 0)
        yield f"{name} {number}:"
        yield ""
        yield f"{fence}text"
        yield content
        yield fence
        yield ""


def _line(value: str) -> str:
    return one_line(value).replace("<", "&lt;")


def _code(value: str) -> str:
    """Return text as code, of which nothing is read as Markdown."""
    return f"`{one_line(value).replace('`', chr(39)).replace('|', '/')}`"
