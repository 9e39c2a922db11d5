"""Options of data: the weights of its files."""

from pathlib import Path

from mlxtune.config.data_config import weighted
from tests.configs import config, problems


def test_data_may_have_a_weight_unless_the_file_is_named_so(tmp_path: Path) -> None:
    odd = tmp_path / "a=2"
    odd.touch()

    assert weighted("a.jsonl=2") == ("a.jsonl", 2.0)
    assert weighted("owner/name:train=.5") == ("owner/name:train", 0.5)
    assert weighted(str(odd)) == (str(odd), 1.0)
    assert weighted("a.jsonl") == ("a.jsonl", 1.0)
    assert weighted("a=b") == ("a=b", 1.0)
    assert config(data={"a.jsonl": 2, "b.jsonl": 0.5}).data == ("a.jsonl=2", "b.jsonl=0.5")


def test_weight_is_a_number_above_zero(tmp_path: Path) -> None:
    (tmp_path / "a").touch()
    wrong = [*("a.jsonl=0", "c=2000", "c=-1", "c=1e9", "c=nan", "c=inf"), f"{tmp_path / 'a'}=two"]
    assert problems(data=[*wrong, "b=1e3"]) == [
        f"--data {each}: the weight must be a number above 0 and at most 1000" for each in wrong
    ]
