"""What a request says: its body, prompts, parameters, tools and grammars, checked."""
