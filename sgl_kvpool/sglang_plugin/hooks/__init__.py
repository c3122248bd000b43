"""Hooks around functions of SGLang, with one module per part of SGLang."""
