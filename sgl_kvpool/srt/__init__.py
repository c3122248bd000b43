"""SGLang's classes with our rows."""
