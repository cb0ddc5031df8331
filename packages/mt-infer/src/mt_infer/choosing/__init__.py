"""How the next token is chosen: penalties, grammars and the draw."""
