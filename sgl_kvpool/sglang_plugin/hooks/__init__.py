"""One module per place of SGLang that is changed."""
