"""Fields of the body of `/v1/responses`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from mt_files import Checks

from mt_infer.forms.bodies import Form
from mt_infer.forms.chat import (
    Call,
    CalledFunction,
    ChatForm,
    Function,
    FunctionFields,
    FunctionName,
    ImagePart,
    ImageUrl,
    Message,
    NamedTool,
    Part,
    TextPart,
    Tool,
)
from mt_infer.forms.choosing import (
    JsonFormat,
    NamedSchema,
    OutputFormat,
    ResponseFormat,
    SchemaFields,
    SchemaFormat,
    TextFormat,
)


@dataclass(frozen=True, kw_only=True)
class InputPart:
    """A part of a message."""


@dataclass(frozen=True, kw_only=True)
class InputText(InputPart):
    """A text by the user.

    Attributes:
        text: The text.
    """

    type_name: ClassVar[str] = "input_text"

    text: str


@dataclass(frozen=True, kw_only=True)
class OutputText(InputPart):
    """A text of an earlier answer.

    Attributes:
        text: The text.
        annotations: Not read.
        logprobs: Not read.
    """

    type_name: ClassVar[str] = "output_text"

    text: str
    annotations: tuple[Any, ...] = ()
    logprobs: tuple[Any, ...] = ()


@dataclass(frozen=True, kw_only=True)
class InputImage(InputPart):
    """An image.

    Attributes:
        image_url: A `data:` URL.
        detail: Ignored; images have the model's size.
    """

    type_name: ClassVar[str] = "input_image"

    image_url: str
    detail: Literal["auto", "low", "high"] = "auto"


@dataclass(frozen=True, kw_only=True)
class InputItem:
    """A step of a conversation.

    Attributes:
        id: Not read.
        status: Not read.
    """

    default_kind: ClassVar[str] = "message"

    id: str = ""
    status: str = ""


@dataclass(frozen=True, kw_only=True)
class InputMessage(InputItem):
    """A message.

    Attributes:
        role: Role of the speaker.
        content: The text, or its parts.
    """

    type_name: ClassVar[str] = "message"

    role: Literal["system", "developer", "user", "assistant"]
    content: str | tuple[InputPart, ...]


@dataclass(frozen=True, kw_only=True)
class InputCall(InputItem):
    """A call of a function, by the assistant.

    Attributes:
        call_id: Its id.
        name: Name of the function.
        arguments: JSON text of an object with the arguments.
    """

    type_name: ClassVar[str] = "function_call"

    call_id: str
    name: str
    arguments: str


@dataclass(frozen=True, kw_only=True)
class InputResult(InputItem):
    """The result of a call.

    Attributes:
        call_id: Id of the call.
        output: The result.
    """

    type_name: ClassVar[str] = "function_call_output"

    call_id: str
    output: str


@dataclass(frozen=True, kw_only=True)
class InputReasoning(InputItem):
    """Reasoning before an earlier answer, which templates drop.

    Attributes:
        summary: Not read.
        content: Not read.
    """

    type_name: ClassVar[str] = "reasoning"

    summary: tuple[Any, ...] = ()
    content: tuple[Any, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ResponseTool(FunctionFields):
    """A function that the model may call.

    Attributes:
        type: Its kind.
    """

    type: Literal["function"]


@dataclass(frozen=True, kw_only=True)
class ResponseToolName:
    """The function that must be called.

    Attributes:
        type: Its kind.
        name: Its name.
    """

    type: Literal["function"]
    name: str


@dataclass(frozen=True, kw_only=True)
class OutputSchema(SchemaFields, OutputFormat):
    """JSON by a schema."""

    type_name: ClassVar[str] = "json_schema"


@dataclass(frozen=True, kw_only=True)
class TextOptions:
    """The text of an answer.

    Attributes:
        format: Its form.
    """

    format: OutputFormat = field(default_factory=TextFormat)


@dataclass(frozen=True, kw_only=True)
class ReasoningOptions:
    """Options of the model's reasoning.

    Attributes:
        effort: For the chat template.
    """

    effort: str | None = None


@dataclass(frozen=True, kw_only=True)
class ResponseForm(Form):
    """Body of `/v1/responses`; see `ChatForm` for other fields.

    Attributes:
        input: The user's message, or a conversation.
        instructions: System message at the beginning.
        max_output_tokens: Largest number of tokens.
        text: Form of the text.
        reasoning: Options of the model's reasoning.
        truncation: Inputs are never cut.
        include: Nothing more is included.
        background: Answers are waited for.
    """

    NOT_SERVED: ClassVar[Mapping[str, str]] = {
        "previous_response_id": "nothing is stored; send the whole conversation as input",
        "conversation": "nothing is stored; send the whole conversation as input",
        "prompt": "nothing is stored; send the text as input",
        "max_tool_calls": "calls are the client's",
        "top_logprobs": "use /v1/chat/completions for logprobs",
        "context_management": "inputs are never cut",
        "moderation": "leave it out",
    }

    input: str | tuple[InputItem, ...]
    model: str = ""
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int | None = None
    stream: bool = False
    text: TextOptions = field(default_factory=TextOptions)
    tools: tuple[ResponseTool, ...] = ()
    tool_choice: Literal["none", "auto", "required"] | ResponseToolName = "auto"
    parallel_tool_calls: bool = True
    reasoning: ReasoningOptions = field(default_factory=ReasoningOptions)
    truncation: Literal["disabled"] = "disabled"
    include: tuple[str, ...] = ()
    background: Literal[False] = False
    store: bool = False

    def __post_init__(self) -> None:
        checks = Checks(self)
        if self.store:
            checks.add("store", "true is not served, because nothing is stored; leave it out")
        if self.input == ():
            checks.add("input", "an empty list; give one item or more")
        if self.include:
            checks.add("include", "nothing more than the answer is sent; leave it out")
        checks.done()
        _ = self.chat  # which has more checks

    @property
    def chat(self) -> ChatForm:
        """The same request to `/v1/chat/completions`."""
        choice = self.tool_choice
        if isinstance(choice, ResponseToolName):
            choice = NamedTool(type="function", function=FunctionName(name=choice.name))
        return ChatForm(
            model=self.model,
            messages=tuple(self._messages()),
            max_completion_tokens=self.max_output_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            seed=self.seed,
            response_format=_format(self.text.format),
            tools=tuple(Tool(type="function", function=_function(each)) for each in self.tools),
            tool_choice=choice,
            parallel_tool_calls=self.parallel_tool_calls,
            reasoning_effort=self.reasoning.effort,
        )

    def _messages(self) -> list[Message]:
        found: list[Message] = []
        if self.instructions is not None:
            found.append(Message(role="system", content=self.instructions))
        if isinstance(self.input, str):
            return [*found, Message(role="user", content=self.input)]
        calls: list[Call] = []
        for item in self.input:
            if isinstance(item, InputCall):
                function = CalledFunction(name=item.name, arguments=item.arguments)
                calls.append(Call(id=item.call_id, function=function))
                continue
            if calls:
                found.append(Message(role="assistant", tool_calls=tuple(calls)))
                calls = []
            if isinstance(item, InputMessage):
                content = item.content
                parts = content if isinstance(content, str) else tuple(map(_part, content))
                found.append(Message(role=item.role, content=parts))
            if isinstance(item, InputResult):
                found.append(Message(role="tool", content=item.output, tool_call_id=item.call_id))
        return [*found, Message(role="assistant", tool_calls=tuple(calls))] if calls else found


def _part(part: InputPart) -> Part:
    if isinstance(part, InputImage):
        return ImagePart(image_url=ImageUrl(url=part.image_url, detail=part.detail))
    assert isinstance(part, InputText | OutputText), "there are no others"  # noqa: S101
    return TextPart(text=part.text)


def _function(tool: ResponseTool) -> Function:
    return Function(name=tool.name, description=tool.description, parameters=tool.parameters)


def _format(form: OutputFormat) -> ResponseFormat:
    if isinstance(form, OutputSchema):
        return SchemaFormat(json_schema=NamedSchema(name=form.name, schema=form.schema))
    assert isinstance(form, TextFormat | JsonFormat), "there are no others"  # noqa: S101
    return form
