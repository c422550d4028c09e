"""`rlcli check` of components that a user may have written."""

from rlcli.inspect.checklist import preflight
from rlcli.recipe.resolve import load_recipe


def test_datasets_without_a_preview_are_checked_by_their_samples(project):
    findings = {finding.about: finding for finding in preflight(load_recipe("toy.yaml"), 5)}
    assert findings["train"].says == "20 rows of toy_rows; checked 5, spread evenly"
    assert list(findings["tokenizer"].details) == [
        "read by transformers, not by its file alone: it is made by transformers"
    ]
    assert "score reward" not in findings
