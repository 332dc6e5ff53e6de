"""Wire formats: bounded fields, the positional codec, framing and sealing."""
