import re
from pathlib import Path

import pytest

from relax.telemetry.live import LIVE
from relax.telemetry.metrics import METRICS, Kind, MetricError, Reduction, reduce, reduce_records, validate
from relax.telemetry.reference import reference


def test_an_unknown_metric_is_refused() -> None:
    """behaviour: B42"""
    with pytest.raises(MetricError, match="unknown metric 'reward_average'"):
        validate({"step": 1.0, "reward_average": 0.5})


@pytest.mark.parametrize("name", [name for name, metric in METRICS.items() if metric.kind is Kind.SHARE])
def test_a_share_over_one_is_refused(name: str) -> None:
    """behaviour: B42"""
    validate({name: 1.0})
    with pytest.raises(MetricError, match=name):
        validate({name: 1.001})
    with pytest.raises(MetricError, match=name):
        validate({name: -0.1})


def test_utilisations_are_shares() -> None:
    """behaviour: B42"""
    assert "trainer_utilisation" in METRICS
    assert all(metric.kind is Kind.SHARE for name, metric in METRICS.items() if "utilisation" in name)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), None, "1", True])
def test_a_value_that_is_no_finite_number_is_refused(value: object) -> None:
    """behaviour: B45"""
    with pytest.raises(MetricError, match="loss"):
        validate({"loss": value})  # type: ignore[dict-item]


def test_all_problems_of_a_record_are_named() -> None:
    with pytest.raises(MetricError, match=r"nonsense.*produced is -1"):
        validate({"nonsense": 1.0, "produced": -1.0})


@pytest.mark.parametrize(
    ("name", "reduction", "value"),
    [
        ("step", Reduction.LAST, 2.0),
        ("groups_trained", Reduction.SUM, 9.0),
        ("reward_mean", Reduction.MEAN, 3.0),
        ("version_lag_max", Reduction.MAX, 6.0),
    ],
)
def test_values_are_reduced_as_the_table_says(name: str, reduction: Reduction, value: float) -> None:
    """behaviour: B42"""
    assert METRICS[name].reduction is reduction
    assert reduce(name, [1.0, 6.0, 2.0]) == value


def test_records_are_reduced_over_those_that_carry_a_metric() -> None:
    assert reduce_records([{"kl": 1.0, "step": 1.0}, {"step": 2.0}, {"kl": 3.0, "step": 3.0}]) == {
        "kl": 2.0,
        "step": 3.0,
    }


@pytest.mark.parametrize(("name", "values"), [("unheard_of", [1.0]), ("loss", [])])
def test_what_cannot_be_reduced_is_refused(name: str, values: list[float]) -> None:
    with pytest.raises(MetricError):
        reduce(name, values)


def test_prometheus_names_are_legal_and_unique() -> None:
    """behaviour: B42"""
    names = [metric.prometheus for metric in METRICS.values()]
    assert len(set(names)) == len(names)
    assert all(name.startswith("relax_") and name.replace("_", "").isalnum() for name in names)
    assert METRICS["step_s"].prometheus == "relax_step_seconds"
    assert METRICS["tokens_per_s"].prometheus == "relax_tokens_per_second"
    assert METRICS["produced"].prometheus == "relax_produced_total"


def test_every_metric_explains_itself() -> None:
    """behaviour: B42"""
    assert all(metric.help and metric.unit for metric in METRICS.values())


def test_every_metric_of_the_tables_is_written_by_some_code() -> None:
    """behaviour: B42"""
    root = Path(__file__).parents[2]
    tables = (root / "relax" / "telemetry", root / "relax" / "cli")
    files = [path for package in ("relax", "services") for path in (root / package).rglob("*.py")]
    written = "\n".join(
        path.read_text() for path in files if not path.is_relative_to(tables[0]) and not path.is_relative_to(tables[1])
    )
    named = set(re.findall(r'"([a-z0-9_]+)"', written)) | set(re.findall(r"\b([a-z0-9_]+)=", written))
    assert sorted((METRICS.keys() | LIVE.keys()) - named) == []


def test_the_page_of_metrics_is_up_to_date() -> None:
    """behaviour: B42"""
    page = Path(__file__).parents[2] / "docs" / "metrics.md"
    assert page.read_text() == reference(), "python -m relax.telemetry.reference > docs/metrics.md"
