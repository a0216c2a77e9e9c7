"""Templates with the marks of each family: the format is detected, and earlier calls come back as the model wrote them."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from engine.text.chat.chat_format import ChatFormat
from engine.text.chat.limits import ModelLimits
from engine.text.chat_template import ChatTemplate
from engine.text.fields.body import checked
from engine.text.fields.chat import ChatFields
from engine.text.message_fallbacks import EarlierCalls
from engine.text.requests.chat_preprocessor import ChatPreprocessor
from engine.text.tokenizer_files import _turn_ends
from engine.text.tools.formats import TOOL_FORMATS, detect_tool_format
from engine.text.types import CallArguments, CallBegin, Content, Reasoning, SamplingDefaults

LISTED = "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}"


def template(user: str, assistant: str, call: str, *, around: str = "", result: str, tools: str = LISTED) -> str:
    """A short template: the texts before each turn, of one call, and around calls, with `|` where the calls are."""
    before, _, after = around.partition("@")
    return (
        f"{tools}{{% for m in messages %}}{{% if m.role == 'tool' %}}{result}{{% elif m.role == 'assistant' %}}{assistant}"
        f"{{{{ m.content }}}}{{% if m.tool_calls %}}{before}{{% for c in m.tool_calls %}}{call}{{% endfor %}}{after}{{% endif %}}"
        f"{{% else %}}{user}{{{{ m.content }}}}{{% endif %}}{{% endfor %}}{{% if add_generation_prompt %}}{assistant}{{% endif %}}"
    )


NAME, OBJECT = "{{ c.function.name }}", "{{ c.function.arguments | tojson }}"
ITEMS = "{% for key, value in c.function.arguments.items() %}"
PLAIN = "{{ value if value is string else value | tojson }}"
DEEPSEEK = {
    "user": "<｜User｜>",
    "assistant": "<｜Assistant｜>",
    "around": "<｜tool▁calls▁begin｜>@<｜tool▁calls▁end｜>",
}
DEEPSEEK |= {"result": "<｜tool▁output▁begin｜>{{ m.content }}<｜tool▁output▁end｜>"}
CHATML = {"user": "<|im_start|>user\n", "assistant": "<|im_start|>assistant\n"}
CHATML |= {"result": "<tool_response>{{ m.content }}</tool_response>"}
ROLES = {"user": "<|start_of_role|>user<|end_of_role|>", "assistant": "<|start_of_role|>assistant<|end_of_role|>"}
ROLES |= {"result": "<|start_of_role|>tool<|end_of_role|>{{ m.content }}"}
TEMPLATES = {
    "kimi_k2": template(
        "<|im_user|>user<|im_middle|>",
        "<|im_assistant|>assistant<|im_middle|>",
        f"<|tool_call_begin|>{{{{ c.id }}}}<|tool_call_argument_begin|>{OBJECT}<|tool_call_end|>",
        around="<|tool_calls_section_begin|>@<|tool_calls_section_end|>",
        result="<|im_system|>tool<|im_middle|>## Return of {{ m.tool_call_id }}\n{{ m.content }}<|im_end|>",
    ),
    "deepseek_v3": template(
        call="{{ '<｜tool▁call▁begin｜>function<｜tool▁sep｜>' + c.function.name + '\\n```json\\n' + c.function.arguments"
        " + '\\n```<｜tool▁call▁end｜>' }}",
        tools="",
        **DEEPSEEK,
    ),
    "deepseek_v31": template(
        call=f"<｜tool▁call▁begin｜>{NAME}<｜tool▁sep｜>{{{{ c.function.arguments }}}}<｜tool▁call▁end｜>", **DEEPSEEK
    ),
    "glm45": template(
        "<|user|>\n",
        "<|assistant|>",
        f"\n<tool_call>{NAME}\n{ITEMS}<arg_key>{{{{ key }}}}</arg_key>\n<arg_value>{PLAIN}</arg_value>\n{{% endfor %}}</tool_call>",
        result="<|observation|>\n<tool_response>\n{{ m.content }}\n</tool_response>",
    ),
    "gemma4": template(
        "<|turn>user\n",
        "<|turn>model\n",
        f"<|tool_call>call:{NAME}{{{{ '{{' }}}}{ITEMS}{{% if not loop.first %}},{{% endif %}}{{{{ key }}}}:"
        "{{ '<|\"|>' + value + '<|\"|>' if value is string else value | tojson }}{% endfor %}{{ '}' }}<tool_call|>",
        result="<|tool_response>response:x{value:<|\"|>{{ m.content }}<|\"|>}<tool_response|>",
    ),
    "qwen3_coder": template(
        call=f"\n<tool_call>\n<function={NAME}>\n{ITEMS}<parameter={{{{ key }}}}>\n{{{{ value | tojson if value is mapping else value }}}}\n"
        "</parameter>\n{% endfor %}</function>\n</tool_call>",
        **CHATML,
    ),
    "granite": template(call="", **ROLES, tools="{% if tools %}After <|tool_call|> comes a list:{% endif %}" + LISTED)
    .replace("{% if m.tool_calls %}", "{% if false %}"),
    "nemotron_json": template(
        "<SPECIAL_11>User\n",
        "<SPECIAL_11>Assistant\n",
        f'{{{{ \'{{"name": "\' + c.function.name + \'", "arguments": \' }}}}{OBJECT}{{{{ "}}" + (", " if not loop.last else "") }}}}',
        around="<TOOLCALL>[@]</TOOLCALL>",
        result="<SPECIAL_11>User\n<TOOL_RESPONSE>[{{ m.content }}]</TOOL_RESPONSE>",
    ),
    "hermes": template(
        call='\n<tool_call>\n{{ {"name": c.function.name, "arguments": c.function.arguments} | tojson }}\n</tool_call>',
        **ROLES,
    ),
    "pythonic": template(
        "<|start_header_id|>user<|end_header_id|>\n\n",
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        f"{NAME}({ITEMS}{{{{ key }}}}={{{{ value | tojson }}}}{{{{ ', ' if not loop.last }}}}{{% endfor %}}){{{{ ', ' if not loop.last }}}}",
        around="[@]",
        result="<|start_header_id|>ipython<|end_header_id|>\n\n{{ m.content }}",
        tools='{% if tools %}"parameters": write [func_name1(name1=value1, ...)]{% endif %}' + LISTED,
    ),
    "lfm2": template(call="", **CHATML, tools="{% if tools %}List of tools: [{% endif %}" + LISTED)
    .replace("{% if m.tool_calls %}", "{% if false %}"),
    "harmony": template(
        "<|start|>user<|message|>",
        "<|start|>assistant",
        "",
        result="<|start|>functions.{{ last.name }} to=assistant<|channel|>commentary<|message|>{{ m.content }}<|end|>",
    )
    .replace("{{ m.content }}{% if m.tool_calls %}", "{% if m.tool_calls %}{% if m.thinking %}<|channel|>analysis<|message|>"
             "{{ m.thinking }}<|end|><|start|>assistant{% endif %}{% set c = m.tool_calls[0] %}{% set last.name = c.function.name %}"
             f" to=functions.{NAME}<|channel|>commentary json<|message|>{OBJECT}<|call|>")
    .replace("{% for m in", "{% set last = namespace(name='') %}{% for m in", 1),
}  # fmt: skip
FORMS = {"deepseek_v3": EarlierCalls(as_text=True), "deepseek_v31": EarlierCalls(as_text=True)}
FORMS |= {name: EarlierCalls(are_shown=False) for name in ("granite", "lfm2")}
FORMS |= {"harmony": EarlierCalls(one_at_a_time=True)}


class Characters:
    """A tokenizer whose tokens are characters and the marks of every format."""

    vocab_size, max_token_chars, eos_token_ids = 2000, 1, frozenset({1999})
    sampling_defaults = SamplingDefaults()

    def __init__(self, source: str, *, has_marks: bool = True) -> None:
        self.chat_template = ChatTemplate(source, {})
        marks = sorted({mark for each in TOOL_FORMATS.values() for mark in each.markup if mark in source})
        self.special_tokens = {mark: 1000 + index for index, mark in enumerate(marks)} if has_marks else {}

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return [self.special_tokens[text]] if text in self.special_tokens else [ord(char) % 1000 for char in text]


def preprocessor(source: str, *, has_marks: bool = True, **settings: Any) -> ChatPreprocessor:
    tokenizer: Any = Characters(source, has_marks=has_marks)
    values: dict[str, Any] = {"vocab_size": 2000, "max_model_len": 9000, "pool_tokens": 9000, "max_logprobs": 5}
    chat_format = ChatFormat.of(tokenizer, **settings)
    return ChatPreprocessor(ModelLimits(**values, has_priorities=False, tokenizer=tokenizer, chat_format=chat_format))


ARGUMENTS = ['{"city": "Rome"}', '{"city": "Os\\"lo", "days": 3}']
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {
    "type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}}}  # fmt: skip
CALLS = [{"id": f"call_{index}", "function": {"name": "weather", "arguments": ARGUMENTS[index]}} for index in (0, 1)]
MESSAGES: list[dict[str, Any]] = [
    {"role": "user", "content": "How is it?"},
    {"role": "assistant", "content": None, "tool_calls": CALLS},
    {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
    {"role": "tool", "tool_call_id": "call_0", "content": "sun"},
    {"role": "user", "content": "So?"},
]


def rendered(made: ChatPreprocessor, messages: list[dict[str, Any]], **fields: Any) -> str:
    return made.render(checked(ChatFields, {"messages": messages, "tools": [WEATHER], **fields}))


@pytest.mark.parametrize("name", TEMPLATES)
def test_earlier_calls_are_read_from_the_prompt_as_they_were(name: str) -> None:
    made = preprocessor(TEMPLATES[name])
    chat_format = made.limits.chat_format
    assert chat_format.tool_format is TOOL_FORMATS[name]
    assert chat_format.earlier_calls == FORMS.get(name, EarlierCalls())
    as_objects = [
        {**c, "function": {**c["function"], "arguments": json.loads(c["function"]["arguments"])}} for c in CALLS
    ]  # type: ignore[dict-item]
    for calls in (CALLS, as_objects):
        messages = [{**message, "tool_calls": calls} if "tool_calls" in message else message for message in MESSAGES]
        text = rendered(made, messages)
        begin = "<|start|>assistant" if name == "harmony" else rendered(made, MESSAGES[:1], add_generation_prompt=True)
        text = text[len(begin) :] if text.startswith(begin) else text[text.index(begin) + len(begin) :]
        parser = TOOL_FORMATS[name].parser({"weather": WEATHER["function"]["parameters"]})  # type: ignore[index]
        pieces = parser.push(text) + parser.finish()
        assert [piece.name for piece in pieces if isinstance(piece, CallBegin)] == ["weather"] * 2, text
        arguments = "".join(piece.text if isinstance(piece, CallArguments) else "\n" for piece in pieces).split()
        assert "".join(arguments) == "".join(ARGUMENTS).replace(" ", "")
        assert text.index("sun") > text.index("Rome")


def test_arguments_that_are_no_object_are_shown_as_they_are() -> None:
    call = {"id": "call_0", "function": {"name": "weather", "arguments": "Rome, I think"}}
    text = rendered(preprocessor(TEMPLATES["lfm2"]), [MESSAGES[0], {**MESSAGES[1], "tool_calls": [call]}])
    assert "<|tool_call_start|>[weather(Rome, I think)]<|tool_call_end|>" in text


def test_kimis_ids_count_through_the_conversation() -> None:
    made = preprocessor(TEMPLATES["kimi_k2"])
    text = rendered(made, [*MESSAGES, {"role": "assistant", "tool_calls": [{**CALLS[0], "id": "functions.weather:2"}]}])
    for index in range(3):
        assert f"<|tool_call_begin|>functions.weather:{index}<" in text
    assert "## Return of functions.weather:1\nrain" in text
    assert "call_" not in text.replace("tool_call_", "")


def test_gpt_oss_sees_one_call_a_message_and_its_result_behind_it() -> None:
    made = preprocessor(TEMPLATES["harmony"])
    text = rendered(made, [MESSAGES[0], {**MESSAGES[1], "reasoning": "Hm."}, *MESSAGES[2:]])
    order = ["<|channel|>analysis<|message|>Hm.<|end|>", "Rome", "sun", "Os", "rain", "So?"]
    assert sorted(order, key=text.index) == order
    assert text.count("<|channel|>analysis") == 1


def test_deepseeks_template_lists_no_tools_so_the_system_message_does() -> None:
    source = TEMPLATES["deepseek_v3"]
    made = preprocessor(source)
    text = rendered(made, [{"role": "system", "content": "Be brief."}, *MESSAGES])
    assert text.startswith("<｜User｜>Be brief.\n\nYou can call these functions")
    assert json.dumps(WEATHER["function"]) in text
    assert 'name_of_function\n```json\n{"argument": "value"}\n```<｜tool▁call▁end｜>' in text
    distilled = preprocessor(source, has_marks=False).limits.chat_format  # has the template, but not the tokens
    assert distilled.tool_format is TOOL_FORMATS["hermes"]
    asked = preprocessor(source, has_marks=False, tool_call_parser="deepseek_v3").limits.chat_format
    assert asked.tool_format is TOOL_FORMATS["deepseek_v3"]
    other = preprocessor(source, tool_call_parser="glm45").limits.chat_format
    assert other.tool_format is TOOL_FORMATS["hermes"]


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("<|im_system|>tool_declare<|im_middle|>", "kimi_k2"),
        ("'<|tool_call|>' '<|start_of_role|>'", "granite"),
        ("<tool_call> <|start_of_role|> </tool_call>", "hermes"),
        ("<|tool_call|>", "json"),
        ("<function_call>", "granite-20b-fc"),
        ("<TOOLCALL>[]</TOOLCALL>", "nemotron_json"),
        ('<|header_start|> [func_name1(a=1)] "parameters"', "llama4_pythonic"),
        ('<|header_start|> "parameters"', "llama4_json"),
        ('<|start_header_id|> "parameters"', "llama3_json"),
        ("<function_calls>", "olmo3"),
        ("List of tools: <|tool_list_start|>[", "lfm2"),
        ("<|channel|><|message|>", "harmony"),
        ("nothing", None),
    ],
)
def test_the_marks_of_a_template_tell_the_format(source: str, name: str | None) -> None:
    found = detect_tool_format(source)
    assert (found and found.name) == name


def test_vllms_names_are_known() -> None:
    aliases = {
        "qwen3_xml": "qwen3_coder",
        "glm47": "glm45",
        "glm4_moe": "glm45",
        "openai": "harmony",
        "granite4": "hermes",
    }
    aliases |= {"qwen3_json": "hermes", "phi4_mini_json": "json"}
    for alias, name in aliases.items():
        assert TOOL_FORMATS[alias] is TOOL_FORMATS[name]
    assert {each.name for each in TOOL_FORMATS.values()} <= TOOL_FORMATS.keys()


@pytest.mark.parametrize(
    ("name", "mark"),
    [("qwen3_coder", "<tool_call>\n<function=weather>"), ("glm45", "<tool_call>weather"),
     ("kimi_k2", "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>{")],
)  # fmt: skip
def test_a_call_ends_thoughts_that_were_not_closed(name: str, mark: str) -> None:
    chat_format = preprocessor(TEMPLATES[name] + "{# </think> #}").limits.chat_format
    make = chat_format.parser_factory(TOOL_FORMATS[name], {"weather": {}}, begins_within=True)
    pieces = (parser := make()).push(f"Hm. {mark}<") + parser.finish()
    assert pieces[0] == Reasoning("Hm.")
    assert name == "glm45" or isinstance(pieces[1], CallBegin)
    without = chat_format.parser_factory(None, {}, begins_within=True)()
    assert {type(piece) for piece in without.push(f"Hm. {mark}<")} == {Reasoning}
    hermes = chat_format.parser_factory(TOOL_FORMATS["deepseek_v31"], {}, begins_within=True)()
    assert not any(isinstance(piece, Content) for piece in hermes.push(f"Hm. {mark}<"))


@pytest.mark.parametrize(
    ("tokens", "named", "ends"),
    [
        (["<|im_end|>", "<|im_start|>", "<|end|>"], {0}, {0, 2}),
        (
            ["<|return|>", "<|end|>", "<|call|>", "<|channel|>"],
            {0, 1},
            {0, 2},
        ),  # gpt-oss: a message ends before the turn
        (
            ["<|endoftext|>", "<|user|>", "<|observation|>", "<|assistant|>"],
            {0},
            {0, 1, 2},
        ),  # GLM has no mark of an end
        (["<|end|>", "<|user|>", "<|assistant|>"], {0}, {0}),
    ],
)
def test_the_ends_of_a_turn_in_a_gguf_vocabulary(tokens: list[str], named: set[int], ends: set[int]) -> None:
    assert _turn_ends({token: index for index, token in enumerate(tokens)}, named) == ends


def test_a_template_that_wants_no_content_beside_calls_or_one_call_a_message() -> None:
    """As DeepSeek-R1's and Llama 3's do."""
    strict = TEMPLATES["deepseek_v3"].replace("{% if m.tool_calls %}", "{% if m.tool_calls and m.content is none %}")
    made = preprocessor(strict)
    assert made.limits.chat_format.earlier_calls == EarlierCalls(as_text=True, needs_none=True)
    text = rendered(made, [MESSAGES[0], {**MESSAGES[1], "content": "Let me see."}, *MESSAGES[2:]])
    assert text.index("Let me see.") < text.index("Rome") < text.index("Os") < text.index("rain")
    single = TEMPLATES["hermes"].replace("{% for c in m.tool_calls %}", "{% if m.tool_calls | length > 1 %}"
                                         "{{ raise_exception('one') }}{% endif %}{% for c in m.tool_calls %}")  # fmt: skip
    made = preprocessor(single)
    assert made.limits.chat_format.earlier_calls == EarlierCalls(one_at_a_time=True)
    for results in (MESSAGES[2:4], MESSAGES[2:3], []):
        text = rendered(made, [*MESSAGES[:2], *results, MESSAGES[4]])
        order = ["Rome", *(["sun"] if len(results) > 1 else []), "Os", *(["rain"] if results else []), "So?"]
        assert sorted(order, key=text.index) == order
        assert all(result["content"] in text for result in results)


def test_a_template_that_wants_descriptions_gets_them() -> None:
    for source, is_given in (
        (TEMPLATES["hermes"], False),
        (TEMPLATES["hermes"].replace(LISTED, "{% for t in tools or [] %}{{ t.function.name + t.function.description }}{% endfor %}"), True),
    ):  # fmt: skip
        made = preprocessor(source)
        assert made.limits.chat_format.needs_descriptions is is_given
        assert "weather" in rendered(made, MESSAGES[:1])


def test_mistrals_template_gets_ids_of_its_length() -> None:
    source = template(
        "[INST]",
        "",
        "{{ c.id }}:{{ c.function.arguments | tojson }}",
        around="[TOOL_CALLS]@",
        result="({{ m.tool_call_id }})",
    )
    text = rendered(
        preprocessor(source), [{**MESSAGES[1], "tool_calls": [{**CALLS[0], "id": "abcdef123"}, CALLS[1]]}, MESSAGES[2]]
    )
    [own, other] = re.findall(r"(\w+):\{\"city\"", text)
    assert own == "abcdef123"
    assert other.isalnum()
    assert f"({other})" in text
