"""instructor: a pydantic model by tools and by JSON, whole and while it grows. `make clients` installs it."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import openai
import pytest
from pydantic import BaseModel

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(find_spec("instructor") is None, reason="instructor is not installed: make clients"),
]
ASK: Any = {
    "model": "smol",
    "messages": [{"role": "user", "content": "Extract: Jason is 25 years old."}],
    "temperature": 0,
    "max_tokens": 200,
}


class Person(BaseModel):
    model_config = {"extra": "forbid"}  # or a model this small adds fields until its tokens end

    name: str
    age: int


@pytest.mark.parametrize("mode", ["TOOLS", "JSON_SCHEMA"])
def test_a_model_comes_whole(base_url: str, mode: str) -> None:
    import instructor

    with openai.OpenAI(base_url=base_url, api_key="none", max_retries=0) as plain:
        client = instructor.from_openai(plain, mode=instructor.Mode[mode])
        person = client.chat.completions.create(**ASK, response_model=Person, max_retries=0)
        assert isinstance(person, Person)


@pytest.mark.parametrize("mode", ["TOOLS", "JSON"])
def test_a_model_grows(base_url: str, mode: str) -> None:
    import instructor

    with openai.OpenAI(base_url=base_url, api_key="none", max_retries=0) as plain:
        client = instructor.from_openai(plain, mode=instructor.Mode[mode])
        states = list(client.chat.completions.create_partial(**ASK, response_model=Person))
    assert len(states) > 1
    assert states[0].age is None
    assert isinstance(states[-1].age, int)
