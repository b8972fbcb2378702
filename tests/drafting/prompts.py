"""Forty prompts for the demo: chat, code, copying, periodic, multi-byte and tool-shaped text."""

from __future__ import annotations

from functools import cache

from tokenizers import Tokenizer

from soloist import demo

PASSAGE = (
    "The old lighthouse stood at the end of the harbor. Every evening the keeper climbed the stairs and lit the lamp. "
    "Ships far away could see the light and find their way home. One night a storm broke the window and the wind blew "
    "the lamp out. The keeper took a candle, walked up again and stayed until the morning."
)
CHAT = (
    "Hello, who are you?",
    "Write a short story about a fox.",
    "Explain what a computer is.",
    "Give me five tips for better sleep.",
    "What is a river?",
    "Write a short letter to a friend about a birthday party.",
    "Tell me about whales.",
    "How can I learn to cook?",
)
CODE = (
    "Write a Python function that adds two numbers.",
    "Write a loop that prints the numbers from 1 to 10.",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "class Queue:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n",
    "SELECT name, price FROM items WHERE price > 10 ORDER BY",
    "for (int i = 0; i < n; i++) {\n    sum += a[i];\n}\nfor (int j = 0;",
)
COPIED = (PASSAGE, PASSAGE.replace("keeper", "captain"), "1. bread 2. cheese 3. apples 4. milk 5. eggs", "a b c d e")
ORDERS = ("Repeat the following text exactly:", "Repeat the following text, but write guard for keeper:")
COPY = tuple(f"{order}\n\n{text}" for order in ORDERS for text in COPIED)
PERIODS = ("tick tock ", "1, 2, 3, ", "- [ ] item\n", "====", "ab", "foo(bar)\n")
PERIODIC = tuple((piece * 40)[:200] for piece in PERIODS)
MULTIBYTE = (
    "Schreibe einen Satz über Äpfel, Öl und Übermut.",
    "Je préfère le café très serré à Orléans, s'il vous plaît.",
    "日本の首都はどこですか。東京について教えてください。",
    "Расскажи о реке Волга и о городе Казань.",
    "🐟🐟🐟 and 🐳 swim in the sea 🌊. Continue: 🐟🐟",
    "naïve façade — “quoted” … ½ €100 ☃",
)
TOOLS = (
    "What is the weather in Paris?",
    '{"name": "get_weather", "arguments": {"city": "Paris", "unit": "celsius"}}\n{"name": "get_weather", "arguments":',
    "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n",
    "| city | temperature |\n|---|---|\n| Paris | 21 |\n| Rome | 27 |\n|",
    "[1, 2, 3, [4, 5, [6, 7]], {",
    "Call the search tool for: red bicycles under 200 euros.",
)


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(demo.path() / "tokenizer.json"))


def ask(text: str) -> list[int]:
    """A user turn with the thinking block closed, as the chat template renders it."""
    turn = f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    return tokenizer().encode(turn, add_special_tokens=False).ids


def prompts() -> list[list[int]]:
    every = [ask(text) for text in (*CHAT, *CODE, *COPY, *PERIODIC, *MULTIBYTE, *TOOLS)]
    assert len(every) == 40
    return every
