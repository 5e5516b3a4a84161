"""What OptPipe's figures and tables show, computed."""
