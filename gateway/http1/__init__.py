"""HTTP/1.1 as this gateway speaks it (RFC 9112): heads, bodies and answers as bytes, and one call as ASGI sees it."""
