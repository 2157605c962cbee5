// Package schema is what the ent client of the compatibility tests is generated from.
package schema

import (
	"entgo.io/ent"
	"entgo.io/ent/schema/field"
)

// Pet has a name.
type Pet struct{ ent.Schema }

// Fields of a Pet.
func (Pet) Fields() []ent.Field { return []ent.Field{field.String("name").Unique()} }
