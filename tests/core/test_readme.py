"""The README says what the code does."""

from pathlib import Path

from kvtier.config import describe

README = (Path(__file__).parents[2] / "README.md").read_text()


def test_the_table_of_settings_is_the_code_s():
    rows = [f"| `{r.name}` | {r.default} | {r.allowed} | {r.meaning} |" for r in describe()]
    table = README.partition("| setting | default | allowed | meaning |\n|---|---|---|---|\n")[2]
    assert table.partition("\n\n")[0].splitlines() == rows
