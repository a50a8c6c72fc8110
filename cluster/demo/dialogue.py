"""Training text of the demo model: plain documentation, and questions about it in the chat form."""

import random
from collections.abc import Iterator, Sequence

from pengserve.cluster.demo.corpus import DocString, first_sentence
from pengserve.cluster.demo.tokenizer import END, START

SHORT_QUESTIONS = (
    "What does {name} do?",
    "What is {name}?",
    "What is {name} for?",
    "Describe {name} in one sentence.",
    "{name}?",
    "In short, what does {name} do?",
)
LONG_QUESTIONS = (
    "Tell me about {name}.",
    "Explain {name}.",
    "How do I use {name}?",
    "Write about {name}.",
    "Please explain {name} to me.",
)
OPEN_QUESTIONS = (
    "Hello!",
    "Hi",
    "Who are you?",
    "Tell me something.",
    "Tell me a story.",
    "Tell me something about Python.",
    "Say something.",
    "What can you do?",
    "Write a sentence.",
)
SYSTEM_PROMPTS = ("You are a helpful assistant.", "You know Python's standard library.", "Be brief.")
MAX_ANSWER_CHARS = 320


def documents(docs: Sequence[DocString], rng: random.Random) -> Iterator[str]:
    """One pass over the corpus in a new order: each text once, and about each describable name one conversation.

    The texts lack the BOS token, which the tokenizer adds.
    """
    answerable = [doc for doc in docs if first_sentence(doc.text)]
    pieces = [doc.text for doc in docs]
    while answerable:
        turns = 2 if rng.random() < 0.2 and len(answerable) > 1 else 1
        pieces.append(conversation([answerable.pop() for _ in range(turns)], rng))
    rng.shuffle(pieces)
    yield from pieces


def conversation(docs: Sequence[DocString], rng: random.Random) -> str:
    """Questions and answers about `docs`, one turn for each, sometimes after a system prompt."""
    text = f"{START}system\n{rng.choice(SYSTEM_PROMPTS)}{END}\n" if rng.random() < 0.25 else ""
    return text + "".join(_turn(doc, rng) for doc in docs)


def _turn(doc: DocString, rng: random.Random) -> str:
    short, long = first_sentence(doc.text), _long_answer(doc.text)
    is_long = len(long) >= len(short) + 40
    if rng.random() < 0.1:
        question, answer = rng.choice(OPEN_QUESTIONS), long
    elif is_long and rng.random() < 0.8:
        question, answer = rng.choice(LONG_QUESTIONS).format(name=_some_name(doc, rng)), long
    else:
        question, answer = rng.choice(SHORT_QUESTIONS).format(name=_some_name(doc, rng)), short
    return f"{START}user\n{question}{END}\n{START}assistant\n{answer}{END}\n"


def _some_name(doc: DocString, rng: random.Random) -> str:
    """The full name, the name within the module, or its last part: as people would ask."""
    return rng.choice((doc.full_name, doc.name or doc.module, doc.full_name.rsplit(".", 1)[-1]))


def _long_answer(text: str) -> str:
    """The first paragraphs of plain prose, each on one line, up to about MAX_ANSWER_CHARS."""
    answer = first_sentence(text)
    paragraphs = [" ".join(part.split()) for part in text.split("\n\n")]
    if len(paragraphs[0]) <= MAX_ANSWER_CHARS and paragraphs[0].startswith(answer[:-1]):
        answer = paragraphs[0]
    for paragraph in paragraphs[1:]:
        if not _is_prose(paragraph) or len(answer) + len(paragraph) > MAX_ANSWER_CHARS:
            break
        answer += "\n" + paragraph
    return answer


def _is_prose(paragraph: str) -> bool:
    return (
        paragraph.endswith((".", "!", "?"))
        and paragraph[0].isalpha()
        and not any(mark in paragraph for mark in (">>>", "::", "--", " = "))
    )
