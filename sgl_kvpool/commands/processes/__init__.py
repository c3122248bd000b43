"""Processes of the commands: forks with SGLang imported, HTTP servers, children that answer, progress."""
