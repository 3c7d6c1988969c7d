"""Titles of causes for people: words instead of slugs.

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
"""Words that people spell differently from the slug."""


def title(slug: str) -> str:
    """Return the title of a slug, as a person would write it."""
    words = " ".join(WORDS.get(word, word) for word in slug.split("_"))
    return words[:1].upper() + words[1:]


def titled(slug: str) -> str:
    """Return the title with the slug in parentheses; a slug of one word has only its title."""
    return f"{title(slug)} ({slug})" if "_" in slug else slug
