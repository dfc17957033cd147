"""24 prompts of 1 to some 700 tokens: several scripts, emoji, code, repetition, odd white space."""

STORY = (
    "The lighthouse keeper counted the ships every evening and wrote their names in a blue book. "
    "On Tuesday there were seven, on Wednesday none, and on Thursday one that had no name at all. "
    "He asked the fishermen, the harbour master and the woman who sold rope; nobody had seen it arrive. "
)
CODE = '''def merge(left: list[int], right: list[int]) -> list[int]:
    """Two sorted lists as one."""
    result = []
    while left and right:
        result.append((left if left[0] <= right[0] else right).pop(0))
    return result + left + right


'''

PROMPTS: list[str] = [
    "A",
    "Hello",
    "Once upon a time",
    "The capital of France is",
    "1, 1, 2, 3, 5, 8, 13,",
    "Q: What is 17 + 25?\nA:",
    "<|im_start|>user\nName three colours.<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>user\nSay only the word yes.<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>system\nYou are a pirate.<|im_end|>\n"
    "<|im_start|>user\nWho are you?<|im_end|>\n<|im_start|>assistant\n",
    "Wie heißt die Hauptstadt von Österreich? Sie heißt",
    "Il était une fois, dans un château très éloigné,",
    "Москва — столица России, а Париж —",
    "日本の首都は東京です。中国の首都は",
    "ما هي عاصمة مصر؟ عاصمة مصر هي",
    "नमस्ते, आप कैसे हैं? मैं",
    "🙂🚀🎉 emoji party: 👩‍👩‍👧‍👦 🏳️‍🌈 and then",
    "import os\nimport sys\n\ndef main(argv):\n    for path in argv[1:]:\n        ",
    "SELECT name, COUNT(*) FROM users\nWHERE created_at > '2024-01-01'\nGROUP BY",
    "\t\n   spaces   and\ttabs \r\n\r\n and zero\u200bwidth",
    "na " * 40 + "Batman",
    STORY * 2 + "The ship",
    CODE * 3 + "def quicksort(",
    STORY * 5 + "Summary: the keeper",
    STORY * 8 + CODE * 2 + "In the end",
]

FEW = [0, 4, 7, 11, 15, 16, 20, 21]
"""Indices of the prompts of the default run."""
