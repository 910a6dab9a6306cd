{{/* Security contexts. */}}

{{/* A pod's; arguments: root, user, group, supplementalGroups. */}}
{{- define "batchllm.podSecurityContext" -}}
{{- $said := (include "batchllm.said" .root | fromYaml).pod.spec.securityContext -}}
{{- $own := dict "runAsUser" (int64 .user) "runAsGroup" (int64 .group) "fsGroup" (int64 .root.Values.pods.fsGroup) -}}
{{- with .supplementalGroups -}}
{{- $groups := list -}}
{{- range . -}}
{{- $groups = append $groups (int64 .) -}}
{{- end -}}
{{- $_ := set $own "supplementalGroups" $groups -}}
{{- end -}}
{{- range $name, $value := $own -}}
{{- $_ := set $said $name $value -}}
{{- end -}}
{{- toYaml $said -}}
{{- end -}}

{{- define "batchllm.containerSecurityContext" -}}
{{- toYaml (first (include "batchllm.said" . | fromYaml).pod.spec.containers).securityContext -}}
{{- end -}}
