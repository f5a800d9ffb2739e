"""Other engines behind the same screen: SGLang, vLLM, llama.cpp and sparkchat's own server, over HTTP.

Standard library only, and the only address that is asked is the one the user named.
"""
