"""Summary sentences of a calibration: the recommended policy, its gain, and the reason when there are no exits."""

from dataclasses import replace

from calibrate.synthetic_calibration import synthetic_file
from tide_calibrate.report.terminal import break_even_rows, certificate_line, predicted_line, recommendation_line

from tide_export.calibration.calibration_file import CalibrationFile

PREDICTED = {"full": 1.0, "exact": 1.31, "exact:router": 1.2, "exit": 1.25}


def file(recommended: str, predicted: dict[str, float], exits: bool = True) -> CalibrationFile:
    made = synthetic_file() if exits else synthetic_file([])
    return replace(made, calibration=replace(made.calibration, recommended=recommended, predicted=predicted))


def test_exact_is_recommended_with_its_gain() -> None:
    assert "Use policy exact: 1.31x" in recommendation_line(file("exact", PREDICTED))
    assert "No exits" not in recommendation_line(file("exact", PREDICTED))
    without = recommendation_line(file("exact", PREDICTED, exits=False))  # drafts of texts pay, as on stock models
    assert without.startswith("Use policy exact: 1.31x") and without.endswith("No exits are placed: the layers never agree.")


def test_full_is_recommended_with_the_reason() -> None:
    """Without exits the sentence must give the reason for that, rather than for a missing certificate."""
    slow = file("full", {"full": 1.0, "exact": 1.01}, exits=False)
    assert recommendation_line(slow).startswith("No exits pay: at most 1.01x")
    assert "No exits are placed: the layers never agree." in recommendation_line(slow)
    kept = file("full", {"full": 1.0, "exact": 1.01, "exit": 1.4})
    assert recommendation_line(kept).startswith("Exits pay for policy exit alone: 1.40x")
    assert certificate_line(slow) == "No certificate for policy exit: there are no exits."


def test_without_costs_no_gain_is_predicted() -> None:
    assert "costs were not measured" in recommendation_line(file("full", {}))
    assert "not predicted" in predicted_line(file("full", {}).calibration)


def test_what_was_not_measured_is_called_a_prediction() -> None:
    """A figure from step costs would be taken for one of this machine."""
    made = file("exact", PREDICTED).calibration
    alone = "exact with drafts from exits alone"
    assert predicted_line(made) == (
        f"full 1.00x, exact 1.31x, {alone} 1.20x, exit 1.25x; predictions from step costs, not measured: exact, {alone}, exit"
    )
    measured = replace(made, predicted_range={"exact": [1.2, 1.45], "exact:router": [1.1, 1.3], "exit": [1.0, 1.5]})
    assert predicted_line(measured) == (f"full 1.00x, exact 1.31x (1.20–1.45), {alone} 1.20x (1.10–1.30), exit 1.25x (1.00–1.50)")


def test_the_table_says_why_no_exit_pays() -> None:
    """Breaks: whoever calibrates a model in vain would not learn whether heads or their price are to blame."""
    rows = break_even_rows(synthetic_file([]))
    assert [row[0] for row in rows] == ["2", "4", "5"]
    # Launch 0.02, 0.1 a layer, head 0.3 of which 0.02 are its launch, 0.05 host: 1.15 ms a pass of 8 layers.
    identity = (0.02 + 2 * 0.1 + 0.3 + 0.05) / 1.15
    tail = (0.02 + 2 * 0.1 + 0.01 + (0.02 + 0.1 + 0.28) + 0.05) / 1.15
    assert rows[0][3] == (f"{identity:.0%}" if rows[0][1] == "identity" else f"{tail:.0%}")
    without = replace(synthetic_file([]), calibration=replace(synthetic_file([]).calibration, costs=None))
    assert break_even_rows(without) == []
