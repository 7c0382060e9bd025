import pytest

from relax.rewards import functions
from relax.rewards.base import RewardConfigError, RewardFunctionError
from relax.rewards.functions import resolve


@pytest.mark.parametrize(
    ("response", "label", "value"),
    [("321", "321", 1.0), (" 321\n", "321", 1.0), ("32", "321", 0.0), ("", "", 1.0), ("7", 7, 1.0)],
)
def test_exact_compares_after_stripping(response: str, label: object, value: float) -> None:
    assert functions.exact(response, label, {}) == value


@pytest.mark.parametrize(
    ("response", "label", "value"),
    [
        ("1234", "1234", 1.0),
        ("1239", "1234", 0.75),
        ("12", "1234", 0.5),
        ("123456", "123", 0.5),
        ("4321", "1234", 0.0),
        ("", "12", 0.0),
        ("", "", 1.0),
    ],
)
def test_overlap_is_the_share_of_right_positions_over_the_longer_string(
    response: str, label: str, value: float
) -> None:
    assert functions.overlap(response, label, {}) == value


@pytest.mark.parametrize("name", ["exact", "overlap", "math"])
def test_a_missing_label_is_an_error_and_never_a_wrong_answer(name: str) -> None:
    """behaviour: B20"""
    with pytest.raises(RewardFunctionError, match="no label"):
        functions.BUILTIN[name]("1", None, {})


@pytest.mark.parametrize(
    ("response", "label", "value"),
    [
        ("\\boxed{\\frac{1}{2}}", "0.5", 1.0),
        ("first \\boxed{3}, no: \\boxed{4}", "4", 1.0),
        ("\\boxed{7} but the answer is 8", "7", 1.0),
        ("The answer is 12, since 3 x 4 = 13 - 1", "12", 1.0),
        ("The answer is $2x+1$", "$1+2x$", 1.0),
        ("so we get 3, then 4, then 12", "12", 1.0),
        ("so we get 12, then 13", "12", 0.0),
        ("it costs 1,234 in all", "1234", 1.0),
        ("-5", "5", 0.0),
        ("it is -5.", -5, 1.0),
        ("#### 18", "some working 9 + 9 = 18\n#### 18", 1.0),
        ("I do not know", "12", 0.0),
        ("", "12", 0.0),
        ("\\boxed{)(}", "12", 0.0),
    ],
)
def test_math_reads_the_answer_in_the_documented_order(response: str, label: object, value: float) -> None:
    assert functions.math(response, label, {}) == value


@pytest.mark.parametrize("label", ["", "((", "\\frac"])
def test_math_refuses_a_label_that_does_not_parse(label: str) -> None:
    """behaviour: B20"""
    with pytest.raises(RewardFunctionError, match="cannot parse the label"):
        functions.math("12", label, {})


def test_format_matches_the_whole_response() -> None:
    pattern = "<think>.*</think>[0-9]+"
    assert functions.format_match("<think>a\nb</think>12", None, {}, pattern=pattern) == 1.0
    assert functions.format_match("<think>a</think>12 and more", None, {}, pattern=pattern) == 0.0


def test_gym_scores_with_the_task_of_the_metadata() -> None:
    entry = {"question": "4 - 1 - 7 =", "answer": "-4", "metadata": {"source_dataset": "chain_sum"}}
    assert functions.gym("-4", "-4", entry["metadata"]) == 1.0  # type: ignore[arg-type]
    assert functions.gym("-4", None, entry) == 1.0
    assert functions.gym("5", "-4", entry) < 1.0
    assert functions.gym("so <answer>-4</answer>", "-4", entry, answer_tag="answer") == 1.0
    assert functions.gym("-4", "-4", entry, answer_tag="answer") == 0.0


@pytest.mark.parametrize(
    ("metadata", "message"), [({}, "source_dataset"), ({"source_dataset": "no_such"}, "no task 'no_such'")]
)
def test_gym_refuses_metadata_that_names_no_task(metadata: dict[str, object], message: str) -> None:
    with pytest.raises(RewardFunctionError, match=message):
        functions.gym("1", "1", metadata)


def test_an_own_function_gets_its_parameters_and_the_prompt_when_it_asks(tmp_path) -> None:
    (tmp_path / "own.py").write_text(
        "def f(response, label, metadata, prompt, *, factor):\n    return factor * len(prompt['text'])\n"
    )
    own = resolve("own.py:f", {"factor": 2}, tmp_path)
    assert own("", None, {}, {"text": "abc"}) == 6


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("overlapp", {}, "use one of exact, overlap"),
        ("format", {}, "pattern"),
        ("exact", {"strip": True}, "strip"),
    ],
)
def test_a_part_that_cannot_be_used_is_refused_when_it_is_resolved(
    tmp_path, name: str, params: dict[str, object], message: str
) -> None:
    """behaviour: B40"""
    with pytest.raises(RewardConfigError, match=message):
        resolve(name, params, tmp_path)
