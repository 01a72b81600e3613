"""Meta primitives, each with a plain-torch form."""
