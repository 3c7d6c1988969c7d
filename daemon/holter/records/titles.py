"""What people call a cause, and its slug beside it.

>>> titled("nonfinite_input")
'Non-finite input (nonfinite_input)'
>>> titled("kl_sign_flipped")
'KL sign flipped (kl_sign_flipped)'
"""

WORDS = {
    "kl": "KL",
    "python": "Python",
    "nonfinite": "non-finite",
    "uninitialised": "not initialised",
    "unreduced": "not reduced",
}
"""Words that a slug spells otherwise than people do."""


def title(slug: str) -> str:
    """The words of a slug as a person writes them."""
    words = " ".join(WORDS.get(word, word) for word in slug.split("_"))
    return words[:1].upper() + words[1:]


def titled(slug: str) -> str:
    """Title and slug; a slug of one word is its own title."""
    return f"{title(slug)} ({slug})" if "_" in slug else slug
