"""A model card: the text of a run's, under the metadata that the hub reads."""

from collections.abc import Iterable

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from mlxtune.core.run.run import Run, text
from mlxtune.core.run.summary import data_names, hub_data
from mlxtune.hub.names import REPOSITORY


def model_card(run: Run, lines: Iterable[str], *, repository: str, base: str, peft: bool) -> str:
    """Return a card as Markdown with the hub's metadata.

    A base model that is not on the hub, which its name shows, is left out of the metadata.
    """
    names = dict.fromkeys(text(each, "repository") for each in hub_data(run))
    datasets = [name for name in names if REPOSITORY.fullmatch(name)]
    data = ModelCardData(
        base_model=base if REPOSITORY.fullmatch(base) else None,
        base_model_relation="adapter" if REPOSITORY.fullmatch(base) else None,
        datasets=datasets or None,
        library_name="peft" if peft else "mlx",
        pipeline_tag="text-generation",
        tags=["lora", "mlx", "mlxtune"],
        model_name=repository.partition("/")[2],
        eval_results=_results(run, datasets) or None,
    )
    body = "\n".join(lines)
    return str(ModelCard(f"---\n{data.to_yaml()}\n---\n\n{body}\n"))


def _results(run: Run, datasets: list[str]) -> list[EvalResult]:
    """Return the losses on the rows held out, before and after."""
    evaluation = run.evaluation
    if evaluation is None or evaluation.adapted is None:
        return []
    losses = {"base model": evaluation.base, "with the adapter": evaluation.adapted}
    return [
        EvalResult(
            task_type="text-generation",
            dataset_type=datasets[0] if datasets else "custom",
            dataset_name=f"rows held out of {', '.join(data_names(run))}",
            metric_type="loss",
            metric_name=f"loss per supervised token, {name}",
            metric_value=round(each.loss, 4),
        )
        for name, each in losses.items()
    ]
