"""The form of the Prefect UI. `tests/acceptance/ui.py` drives it in a browser."""

from flows.recipe import PipelineConfig


def test_the_form_heads_sections_with_their_names_in_the_recipe():
    schema = PipelineConfig.model_json_schema()
    sections = {name: field["$ref"] for name, field in schema["properties"].items() if "$ref" in field}
    titles = {name: schema["$defs"][reference.rpartition("/")[2]]["title"] for name, reference in sections.items()}
    assert {name: title.lower() for name, title in titles.items()} == {name: name for name in titles}
    assert "model" in titles
