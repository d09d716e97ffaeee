"""The routes of OpenAI's API, one file each, and what their answers share."""
