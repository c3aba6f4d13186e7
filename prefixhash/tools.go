package prefixhash

// tools adds tool definitions in their order. The members of a tool that every
// API has are taken by name, so that their order and nesting don't count; a
// parameter schema is printed by templates and is added as it stands.
func (r *keyer) tools(n ref) {
	for e := r.first(n); e != 0; e = r.next(n, e) {
		if r.kind(e) != object {
			continue
		}
		r.known(e) // what only some tools have is sorted: any may be missing
		r.mark(markTool)
		tool := e
		if f := r.get(e, "function"); r.kind(f) == object {
			tool = f
			r.toolRest(e)
		}
		r.field(markName, r.get(tool, "name"))
		r.field(markText, r.get(tool, "description"))
		r.field(markArguments, r.either(r.get(tool, "parameters"), r.get(tool, "input_schema")))
		r.toolRest(tool)
	}
	r.known(n)
}

// toolRest adds the members of a tool that only some have, such as the options
// of a server-side tool.
func (r *keyer) toolRest(n ref) {
	kind := r.get(n, "type")
	if word := string(r.short(kind)); word != "" && word != "function" && word != "custom" {
		r.field(markField, kind)
	}
	r.members(n, "type", "function", "name", "description", "parameters", "input_schema", "cache_control")
}

// documents adds what a template prints for retrieval, each starting a block.
func (r *keyer) documents(n ref) {
	for e := r.first(n); e != 0; e = r.next(n, e) {
		if r.kind(e) >= text {
			r.mark(markDocument)
			r.json(e, false)
			r.cut()
		}
	}
}
