"""Choice of the next token: penalties, grammars and the draw."""
