"""Taking turns: the halves of a model are trained in alternate fits, and what rests drops nothing out."""

policies = {"taking_turns": "policy"}
