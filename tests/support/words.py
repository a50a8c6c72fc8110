"""Words and phrases that name no subject, or are no plain English. Code, help texts and documents do without them."""

FORBIDDEN = ("whoever", "somebody", "nobody", "whatever", "anybody", "of its own accord", "in two minds")
