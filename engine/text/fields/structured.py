"""OpenAI's response_format and vLLM's structured_outputs, as grammars."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, WithJsonSchema, model_validator

from engine.text.fields.body import Refused, RequestBody, refused_field
from engine.text.grammars.spec import ANY_OBJECT, GrammarKind, GrammarSpec, close_schema

_MAX_TAGS = 256
MAX_CHOICES = 2000  # beyond it llguidance's table for one step is full
_WHITESPACE = r"[\x20\x09\x0A\x0D]{0,40}"  # between JSON's tokens: a model that would indent for ever has to go on


def _parsed(value: Any) -> Any:
    """Return the object of a schema that came as text."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        raise ValueError("is a string that is not JSON; send the schema as an object") from None


def _is_schema(value: Any) -> Any:
    value = {} if (parsed := _parsed(value)) is True else parsed
    if not isinstance(value, dict):
        raise ValueError("must be a JSON schema: an object, or true")
    return value


Schema = Annotated[Any, AfterValidator(_is_schema), WithJsonSchema({"type": ["object", "boolean", "string"]})]


def _are_distinct(choices: list[str]) -> list[str]:
    if len(set(choices)) != len(choices):
        raise refused_field("", "names a choice twice.")
    if choices == [""]:
        raise refused_field("", "has the empty text as its only choice.")
    return choices


Choices = Annotated[list[str], Field(min_length=1, max_length=MAX_CHOICES), AfterValidator(_are_distinct)]
WhitespacePattern = Annotated[str, Field(max_length=200)]


class JsonSchemaFormat(RequestBody):
    """`strict` refuses keywords that cannot be enforced, and closes objects."""

    NO_OPS: ClassVar[frozenset[str]] = frozenset({"description"})

    name: str = Field("", max_length=64, pattern=r"^[a-zA-Z0-9_.-]*$", description="Its name.")
    schema_: Schema = Field(alias="schema", description="A JSON schema.")
    strict: bool = Field(False, description="Enforce the schema while the model generates.")


class Structure(RequestBody):
    """A tag that may begin anywhere in free text, and what follows it."""

    begin: str = Field(min_length=1, description="The text that opens the part.")
    schema_: Schema = Field(alias="schema", description="A JSON schema.")
    end: str = Field(description="The text that closes the part.")


class ResponseFormat(RequestBody):
    """OpenAI's field of that name, with vLLM's type `structural_tag`."""

    UNSUPPORTED: ClassVar[Mapping[str, Refused]] = {
        "schema": Refused((), "send type: json_schema, and json_schema: {name: ..., schema: ...}"),
        "strict": Refused((False,), "send it in json_schema"),
    }

    type: Literal["text", "json_object", "json_schema", "structural_tag"] = Field(
        description="Which kind of object this is."
    )
    json_schema: JsonSchemaFormat | None = Field(None, description="The schema, with its name.")
    structures: list[Structure] = Field(default_factory=list, max_length=_MAX_TAGS, description="The tagged parts.")
    triggers: list[str] = Field(
        default_factory=list, max_length=_MAX_TAGS, description="Texts after which a tagged part must follow."
    )

    @model_validator(mode="after")
    def _check(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            wrong = "is missing" if self.json_schema is None else f"has no meaning with type {self.type}"
            raise refused_field("json_schema", f"{wrong}.")
        is_tagged = self.type == "structural_tag"
        for name, value in (("structures", self.structures), ("triggers", self.triggers)):
            if bool(value) != is_tagged:
                wrong = "is missing or empty" if is_tagged else f"has no meaning with type {self.type}"
                raise refused_field(name, f"{wrong}.")
        for structure in self.structures:
            if not any(trigger and structure.begin.startswith(trigger) for trigger in self.triggers):
                raise refused_field("structures", "has a begin that starts with none of the triggers.")
        return self

    def spec(self) -> GrammarSpec | None:
        """Return the grammar, or None for text."""
        if self.type == "json_object":
            return ANY_OBJECT._replace(whitespace=_WHITESPACE)
        if self.json_schema is not None:
            asked = self.json_schema
            schema = close_schema(asked.schema_) if asked.strict else asked.schema_
            return GrammarSpec.of_json_schema(schema, whitespace=_WHITESPACE, is_lenient=not asked.strict)
        return self._tags() if self.structures else None

    def _tags(self) -> GrammarSpec:
        """Return the grammar of tags in free text, each under its longest trigger."""
        tags = []
        for structure in self.structures:
            fitting = [trigger for trigger in self.triggers if trigger and structure.begin.startswith(trigger)]
            trigger = max(fitting, key=len)
            schema = {**structure.schema_, "x-guidance": {"whitespace_pattern": _WHITESPACE}}
            tags.append({"trigger": trigger, "begin": structure.begin, "grammar": schema, "end": structure.end})
        return GrammarSpec(GrammarKind.STRUCTURAL_TAG, json.dumps(tags))


class StructuredOutputs(RequestBody):
    """vLLM's field of that name: exactly one constraint, and its whitespace."""

    json_: Schema | None = Field(None, alias="json", description="A JSON schema, as an object or a text.")
    json_object: bool = Field(False, description="Any JSON object.")
    regex: str | None = Field(None, min_length=1, description="A regular expression.")
    choice: Choices | None = Field(None, description="A list of texts, of which the answer is one.")
    grammar: str | None = Field(None, min_length=1, description="A grammar, in Lark or GBNF.")
    structural_tag: Annotated[ResponseFormat | None, Field()] = Field(
        None, description="Free text with tagged parts of a given form."
    )
    whitespace_pattern: WhitespacePattern | None = Field(
        None, description="A regular expression of the white space in JSON."
    )
    disable_any_whitespace: bool = Field(False, description="JSON without white space.")

    @model_validator(mode="before")
    @classmethod
    def _read_tag(cls, data: Any) -> Any:
        """Parse a structural tag, which comes as text."""
        if isinstance(data, dict) and isinstance(data.get("structural_tag"), str):
            return {**data, "structural_tag": _parsed(data["structural_tag"])}
        return data

    @model_validator(mode="after")
    def _check(self) -> StructuredOutputs:
        given = [name for name, value in self._constraints().items() if value not in (None, False)]
        if len(given) != 1:
            named = " and ".join(given) if given else "none"
            raise refused_field(
                "", f"needs exactly one of json, json_object, regex, choice, grammar and structural_tag, not {named}."
            )
        if self.structural_tag is not None and self.structural_tag.type != "structural_tag":
            raise refused_field("structural_tag", "must have the type structural_tag.")
        return self

    def _constraints(self) -> dict[str, Any]:
        names = ("json_", "json_object", "regex", "choice", "grammar", "structural_tag")
        return {name.rstrip("_"): getattr(self, name) for name in names}

    def spec(self) -> GrammarSpec | None:
        """Return the grammar."""
        whitespace = self.whitespace_pattern if self.whitespace_pattern is not None else _WHITESPACE
        if self.disable_any_whitespace:
            whitespace = ""
        if self.json_ is not None:
            return GrammarSpec.of_json_schema(self.json_, whitespace=whitespace)
        if self.json_object:
            return ANY_OBJECT._replace(whitespace=whitespace)
        if self.regex is not None:
            return GrammarSpec(GrammarKind.REGEX, self.regex)
        if self.choice is not None:
            return GrammarSpec(GrammarKind.CHOICE, json.dumps(self.choice))
        if self.grammar is not None:
            return GrammarSpec(GrammarKind.LARK, self.grammar)
        return None if self.structural_tag is None else self.structural_tag.spec()
